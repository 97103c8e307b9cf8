"""All that the end of a step writes to, by kernel and by plain operations."""

import torch

from gradscale import DynamicScale
from gradscale.core.state import FixedState, ScaleState
from gradscale.torch.device_state.layout import new_account, new_device_state
from gradscale.torch.device_state.update import Part, settle


class Books:
    """All that the end of a step writes to, and a way to end one."""

    def __init__(self, policy, device, kind, mailbox=None):
        self.mailbox = mailbox
        self.policy, self.device, self.kind = policy, device, kind
        first = policy.init_state()
        self.ledger = new_device_state(device, first.scale)
        self.account = new_account(device, applied=5, skipped=2)
        scale = torch.tensor(first.scale, device=device)
        self.state = FixedState(scale)
        if isinstance(policy, DynamicScale):
            steps = torch.tensor(0, dtype=torch.int32, device=device)
            self.state = ScaleState(scale, steps, self.ledger.debt)

    def number(self, value):
        return None if value is None else torch.tensor(value, device=self.device)

    def end(self, skip=0.0, *, found=None, hold=False, stepped=True, **facts):
        self.ledger.fields.loss_trace.fill_(facts.get("loss_trace", 0.0))
        self.ledger.fields.refused.fill_(facts.get("refused", 0.0))
        part = Part(
            account=self.account,
            scale=self.number(facts.get("scale", 8.0)),
            stepped=stepped,
            skip=self.number(skip),
            found=self.number(skip if found is None else found),
            norm_found=self.number(facts.get("norm_found")),
            norm=self.number(facts.get("norm")),
            amax=self.number(facts.get("amax")),
        )
        settle(
            self.policy,
            self.state,
            self.ledger,
            [part],
            hold_on_bad_loss=hold,
            forced_scale=None,
            kernels=self.kind,
            mailbox=self.mailbox,
        )

    def tensors(self):
        total = self.ledger.total
        return {
            **self.state._asdict(),
            "debt": self.ledger.debt,
            "used_scale": self.ledger.used_scale,
            "kept": self.ledger.kept,
            "ring": self.ledger.ring,
            "row": self.account.row,
            "tally": self.account.tally,
            "total row": total.row,
            "total tally": total.tally,
        }

    def shown(self):
        """Return every value as text, in which NaN equals NaN."""
        return {name: repr(value.tolist()) for name, value in self.tensors().items()}

    def plain_state(self):
        return tuple(value.item() for value in self.state)
