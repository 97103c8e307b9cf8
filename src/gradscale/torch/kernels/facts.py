"""What a read has found in many tensors of one kind."""

from typing import NamedTuple

import torch
from torch import Tensor


class TensorFacts(NamedTuple):
    """What was read of each tensor. On their device.

    Attributes:
        dtype: That of all of them.
        peaks: f32[n], the largest magnitude; NaN if there is one.
        squares: f64[n], the sum of squares.
    """

    dtype: torch.dtype
    peaks: Tensor
    squares: Tensor
