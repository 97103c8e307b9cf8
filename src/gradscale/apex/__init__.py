"""NVIDIA apex's mixed precision on gradscale: `from gradscale.apex import amp`.

Runs scripts written for apex, on any device and without a compiled extension. See
docs/apex.md for the differences.
"""

from gradscale.apex import (
    amp,
    fp16_utils,
    multi_tensor_apply,
    normalization,
    optimizers,
    parallel,
)
from gradscale.apex.as_apex import install_as_apex

__all__ = [
    "amp",
    "fp16_utils",
    "install_as_apex",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
]
