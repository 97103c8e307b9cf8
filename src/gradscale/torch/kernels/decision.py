"""What follows from one read of the gradients."""

from typing import NamedTuple

from torch import Tensor


class Decision(NamedTuple):
    """All that a step needs to know. f32[] each, on the device.

    Attributes:
        found: 1 if a gradient is not finite, or would not be once multiplied; else 0.
        norm_found: 1 if the norm or the multiplier is not a usable f32, else 0.
        skip: 1 if either is, else 0.
        amax: The largest magnitude of the gradients as they came.
        norm: The norm of the unscaled gradients.
        coef: The clip coefficient, in [0, 1]; 1 without a clip.
        multiplier: `coef / scale`, what turns the gradients into those to step by.
        grad_scale: `scale / coef`, the same as PyTorch's fused optimizers want it.
    """

    found: Tensor
    norm_found: Tensor
    skip: Tensor
    amax: Tensor
    norm: Tensor
    coef: Tensor
    multiplier: Tensor
    grad_scale: Tensor


FIELDS = Decision._fields
