"""The tensors that the end of a step writes to, by kernel and by plain operations."""

import math

import torch

from gradscale import DynamicScale
from gradscale.core.state import FixedState, ScaleState
from gradscale.torch.device_state.layout import new_device_state, new_totals
from gradscale.torch.device_state.update import StepSummary, update_


class UpdateCase:
    """The tensors that the end of a step writes to, and a way to end one."""

    def __init__(self, policy, device, kernels):
        self.policy, self.device, self.kernels = policy, device, kernels
        first = policy.init_state()
        self.state = new_device_state(device, first.scale)
        self.totals = new_totals(device, applied=5, skipped=2)
        scale = torch.tensor(first.scale, device=device)
        self.scaling = FixedState(scale)
        if isinstance(policy, DynamicScale):
            steps = torch.tensor(0, dtype=torch.int32, device=device)
            self.scaling = ScaleState(scale, steps, self.state.debt)

    def number(self, value):
        return None if value is None else torch.tensor(value, device=self.device)

    def end(self, skip=0.0, *, nonfinite=None, hold=False, stepped=True, **facts):
        self.state.fields.loss_trace.fill_(facts.get("loss_trace", 0.0))
        self.state.fields.refused.fill_(facts.get("refused", 0.0))
        self.state.fields.loss.fill_(facts.get("loss", math.nan))
        step = StepSummary(
            totals=self.totals,
            scale=self.number(facts.get("scale", 8.0)),
            stepped=stepped,
            skip=self.number(skip),
            nonfinite=self.number(skip if nonfinite is None else nonfinite),
            norm_unusable=self.number(facts.get("norm_unusable")),
            norm=self.number(facts.get("norm")),
            amax=self.number(facts.get("amax")),
        )
        update_(
            self.policy,
            self.scaling,
            self.state,
            [step],
            hold_on_bad_loss=hold,
            forced_scale=None,
            kernels=self.kernels,
        )

    def tensors(self):
        total = self.state.total
        return {
            **self.scaling._asdict(),
            "debt": self.state.debt,
            "used_scale": self.state.used_scale,
            "kept": self.state.persistent,
            "ring": self.state.ring,
            "row": self.totals.row,
            "counts": self.totals.counts,
            "total row": total.row,
            "total counts": total.counts,
        }

    def shown(self):
        """Return every value as text, in which NaN equals NaN."""
        return {name: repr(value.tolist()) for name, value in self.tensors().items()}

    def plain_scaling(self):
        return tuple(value.item() for value in self.scaling)
