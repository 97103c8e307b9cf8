"""The five precisions that the demo compares."""

from dataclasses import dataclass

import torch

from gradscale.core.policies import DynamicScale, StaticScale


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How one run computes.

    Attributes:
        name: As in tables and figures.
        dtype: What `torch.autocast` computes in; float32 turns it off.
        policy: What scales the loss; None for nothing at all.
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
# All defaults but one: 2000 finite steps in a row are more than the demo has.
FP16_DYNAMIC = Precision(
    name="FP16 dynamic", dtype=torch.float16, policy=DynamicScale(growth_interval=20)
)
PRECISIONS = (FP32, BF16, FP16_BARE, FP16_STATIC, FP16_DYNAMIC)
