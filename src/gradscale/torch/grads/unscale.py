"""Multiplies gradients in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradscale.torch.devices import to_device
from gradscale.torch.grads.stats import by_kind
from gradscale.torch.tensor_list import Kind


@torch.no_grad()
def multiply_(
    tensors: Sequence[Tensor], multiplier: Tensor, kind: Kind | None = None
) -> None:
    """Multiply each tensor by `multiplier` in place, in f32 or wider, then round.

    No host sync. Undefined if two entries share memory.

    Args:
        tensors: float[...] each, any mix of dtypes and devices.
        multiplier: f32[] or f32[1], on any device.
        kind: Device and dtype of all of them, if that is known.
    """
    if kind is not None:
        groups = [(kind, list(tensors))]
    else:
        groups = [(found, group) for found, _, group in by_kind(tensors)]
    for (device, dtype), group in groups:
        here = multiplier
        if here.device != device:
            here = to_device(multiplier, device)
        if dtype is torch.bfloat16 and device.type != "cpu":
            # The op below has no bf16 kernel on CUDA in torch 2.11 and 2.13.
            for tensor in group:
                tensor.copy_(tensor.float() * here)
        else:
            # The only op that multiplies f16 by an f32 scalar without rounding the
            # scalar to f16 first, where 2**-25 would be 0.
            torch._amp_foreach_non_finite_check_and_unscale_(
                group, torch.zeros_like(here), here
            )


@torch.no_grad()
def zero_where_(tensors: Sequence[Tensor], flag: Tensor) -> None:
    """Set each tensor to 0 in place where a flag is 1. No host sync.

    Args:
        tensors: float[...] each, on any device.
        flag: f32[], 0 or 1. A product would leave NaN.
    """
    masks: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        mask = masks.get(tensor.device)
        if mask is None:
            mask = masks[tensor.device] = to_device(flag, tensor.device) == 1.0
        tensor.masked_fill_(mask, 0.0)
