"""Apex's lists for `torch.Tensor`.

Operators reach a `TorchFunctionMode` under the name of their method: `x @ y` as
`matmul`, `x + y` as `add`.
"""

import torch

from gradscale.apex.amp.lists import torch_overrides

MODULE = torch.Tensor

FP16_FUNCS = [
    "__matmul__",
    *(name for name in torch_overrides.FP16_FUNCS if not name.startswith("conv")),
]

FP32_FUNCS = [
    *("__ipow__", "__pow__", "__rpow__"),
    "cpu",
    *torch_overrides.FP32_FUNCS,
]

CASTS = [
    *("__add__", "__div__", "__eq__", "__ge__", "__gt__"),
    *("__iadd__", "__idiv__", "__imul__", "__isub__", "__itruediv__"),
    *("__le__", "__lt__", "__mul__", "__ne__"),
    *("__radd__", "__rdiv__", "__rmul__", "__rsub__", "__rtruediv__"),
    *("__sub__", "__truediv__"),
    *(name for name in torch_overrides.CASTS if name != "bilinear"),
]

SEQUENCE_CASTS: list[str] = []
