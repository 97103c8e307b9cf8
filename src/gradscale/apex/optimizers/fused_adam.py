"""FusedAdam on gradscale's kernels."""

from typing import Any

import torch
from torch import Tensor

from gradscale.torch.kernels.args import AmpArgs
from gradscale.torch.optim import Adam
from gradscale.torch.optim.batches import BatchStep
from gradscale.torch.optim.state import STEP

# A step count at which 1 - beta^step is 1: no bias correction. f32 counts no further.
LATE = 2.0**24


class FusedAdam(Adam):
    """`gradscale.torch.optim.Adam` with apex's arguments.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = FusedAdam([weight], lr=0.5)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> weight.data
    tensor([0.5000, 0.5000])

    Args:
        params, lr, betas, eps, weight_decay, amsgrad: As in torch's Adam.
        bias_correction: Correct the moments for their start at 0; each group may have
            its own.
        adam_w_mode: Decoupled weight decay, as in AdamW.
        set_grad_none: `zero_grad` removes gradients instead of filling them with 0.
        capturable, master_weights: Have no effect: every step can be captured, and
            half-precision parameters have f32 masters.
        max_grad_norm: The gradients of each group are clipped to this joint norm; 0
            for no clip. Apex had it until 2019.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )
        own = {"bias_correction": bias_correction, "max_grad_norm": max_grad_norm}
        self.defaults |= own
        for group in self.param_groups:
            group |= {**own, **group}

    def update_(self, step: BatchStep, amp: AmpArgs) -> None:
        """Run one pass."""
        if not step.group["bias_correction"]:
            torch._foreach_clamp_min_(step.batch.columns[STEP], LATE)
        most = step.group["max_grad_norm"]
        if most > 0.0:
            scale = 1.0 if amp.grad_scale is None else amp.grad_scale
            norm = _norm(step.group["params"]).to(step.batch.device)
            # The pass divides the gradients by it.
            amp = amp._replace(grad_scale=(norm / most).clamp(min=scale))
        super().update_(step, amp)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the step count in each group too, as in apex.

        Syncs with the device.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            states = [saved["state"].get(key, {}) for key in group["params"]]
            counts = [state[STEP] for state in states if STEP in state]
            if counts:
                home = counts[0].device
                highest = torch.stack([count.to(home) for count in counts]).max()
                group[STEP] = int(highest)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`, also of apex's FusedAdam.

        Apex keeps the step count in the groups, and saves fewer settings: those that
        are missing stay as they are.
        """
        states, groups = dict(state_dict["state"]), []
        for index, saved in enumerate(state_dict["param_groups"]):
            own = self.param_groups[index] if index < len(self.param_groups) else {}
            group = {**own, **saved}
            count = group.pop(STEP, None)
            for key in saved["params"]:
                if key in states and count is not None:
                    states[key] = {STEP: float(count), **states[key]}
            groups.append(group)
        super().load_state_dict({**state_dict, "state": states, "param_groups": groups})

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _norm(params: list[Tensor]) -> Tensor:
    grads = [param.grad for param in params if param.grad is not None]
    norms = torch._foreach_norm(grads, 2, torch.float32)
    return torch.stack([norm.to(grads[0].device) for norm in norms]).norm()
