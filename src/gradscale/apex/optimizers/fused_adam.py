"""FusedAdam on gradscale's kernels."""

from typing import Any

from gradscale.torch.optim import Adam

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
        bias_correction: Correct the moments for their start at 0.
        adam_w_mode: Decoupled weight decay, as in AdamW.
        set_grad_none: `zero_grad` removes gradients instead of filling them with 0.
        capturable, master_weights: Have no effect: every step can be captured, and
            half-precision parameters have f32 masters.
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
    ) -> None:
        self.bias_correction = bias_correction
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

    def first_count(self, state: dict[str, Any]) -> float:
        """Return the count before the first step."""
        return 0.0 if self.bias_correction else LATE

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
