"""The five precisions that the demo compares."""

from dataclasses import dataclass

import torch

from gradscale.core.policies import DynamicScale, StaticScale


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Compute dtype and loss scaling of one run.

    Attributes:
        name: In tables and figures.
        dtype: Of `torch.autocast`; float32 disables it.
        policy: Of the loss scale; None without loss scaling.
    """

    name: str
    dtype: torch.dtype
    policy: StaticScale | DynamicScale | None = None


FP32 = Precision(name="FP32", dtype=torch.float32)
BF16 = Precision(name="BF16", dtype=torch.bfloat16)
FP16_BARE = Precision(name="FP16 bare", dtype=torch.float16)
FP16_STATIC = Precision(
    name="FP16 static", dtype=torch.float16, policy=StaticScale(scale=2.0**12)
)
# Defaults except growth_interval: 2000 is longer than the demo.
FP16_DYNAMIC = Precision(
    name="FP16 dynamic", dtype=torch.float16, policy=DynamicScale(growth_interval=20)
)
PRECISIONS = (FP32, BF16, FP16_BARE, FP16_STATIC, FP16_DYNAMIC)
