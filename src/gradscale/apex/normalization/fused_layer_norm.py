"""The norms of torch with apex's arguments."""

from typing import Any

import torch
from torch import Tensor


class FusedLayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`; `memory_efficient` has no effect.

    >>> FusedLayerNorm(2)(torch.tensor([1.0, 3.0])).round().tolist()
    [-1.0, 1.0]
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class FusedRMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`; `memory_efficient` has no effect."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)


class MixedFusedLayerNorm(FusedLayerNorm):
    """A layer norm whose result has the dtype of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize in the dtype of the weight."""
        return super().forward(input.to(self.weight.dtype))


class MixedFusedRMSNorm(FusedRMSNorm):
    """An RMS norm whose result has the dtype of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize in the dtype of the weight."""
        return super().forward(x.to(self.weight.dtype))
