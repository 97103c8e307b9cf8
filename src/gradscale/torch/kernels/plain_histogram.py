"""How many elements of each exponent a tensor has, in plain operations.

A row of counts has `SLOTS` places: zeros, magnitudes below all bins, a bin for each
exponent from `LOWEST` to 15, finite magnitudes above, and inf with NaN. The last place
is never counted in: kernels send there what lies outside of a tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SLOTS = 64
ZEROS, BELOW, FIRST, ABOVE, NONFINITE, OUTSIDE = 0, 1, 2, 61, 62, 63
# 19 octaves below the smallest f16: what a scale 2^19 times as high would rescue.
LOWEST = -43
# Pieces that stay in the cache of a CPU, temporaries included.
PIECE = 2**17
# A GPU needs large pieces; temporaries take 24 bytes an element.
PIECE_ON_DEVICE = 2**24


def count_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return how many elements of each tensor belong to each slot. No host sync.

    Args:
        tensors: float[...] each, on one device, of any strides.

    Returns:
        i64[n, SLOTS], on that device.
    """
    return torch.stack([_count(tensor.detach()) for tensor in tensors])


def _count(tensor: Tensor) -> Tensor:
    on_host = tensor.device.type == "cpu"
    counts = torch.zeros(SLOTS, dtype=torch.int64, device=tensor.device)
    for piece in tensor.reshape(-1).split(PIECE if on_host else PIECE_ON_DEVICE):
        slots = _slots_of(piece)
        if on_host:
            counts += torch.bincount(slots, minlength=SLOTS)
        else:
            # Of integers, so their order does not matter. bincount would wait.
            slots = slots.long()
            counts.scatter_add_(0, slots, torch.ones_like(slots))
    return counts


def _slots_of(values: Tensor) -> Tensor:
    """Return the slot of each element, as integers."""
    if values.dtype is torch.float64:
        bits, digits, infinite = values.view(torch.int64), 52, 0x7FF
    else:
        # Exact: f32 has every value of f16 and bf16.
        bits, digits, infinite = values.float().view(torch.int32), 23, 0xFF
    magnitude = bits & ((1 << (digits + infinite.bit_length())) - 1)
    exponent = magnitude >> digits
    slots = (exponent - (infinite >> 1) - LOWEST + FIRST).clamp_(BELOW, ABOVE)
    slots.masked_fill_(magnitude == 0, ZEROS)
    return slots.masked_fill_(exponent == infinite, NONFINITE)
