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
# Elements that are worked on at once. On a CPU they stay in the cache with all
# temporaries, and torch starts no threads for so few; a GPU needs many, and
# temporaries take 24 bytes of each.
PIECE = 2**15
PIECE_ON_DEVICE = 2**24


def count_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return how many elements of each tensor belong to each slot. No host sync.

    Args:
        tensors: float[...] each, on one device and of one dtype, of any strides.

    Returns:
        i64[n, SLOTS], on that device.
    """
    return torch.stack([_count(tensor.detach().reshape(-1)) for tensor in tensors])


def _count(values: Tensor) -> Tensor:
    on_host = values.device.type == "cpu"
    tally = tallied_on_host if on_host else tallied_on_device
    pieces = values.split(PIECE if on_host else PIECE_ON_DEVICE)
    counts = [tally(_slots_of(piece)) for piece in pieces]
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)


def tallied_on_host(slots: Tensor) -> Tensor:
    """Return i64[SLOTS], how often each slot is there; on a GPU it would wait."""
    return torch.bincount(slots, minlength=SLOTS)


def tallied_on_device(slots: Tensor) -> Tensor:
    """Return the same without waiting. Integers: their order does not matter."""
    places = slots.long()
    counts = torch.zeros(SLOTS, dtype=torch.int64, device=slots.device)
    return counts.scatter_add_(0, places, torch.ones_like(places))


def _slots_of(values: Tensor) -> Tensor:
    """Return the slot of each element, as integers."""
    if values.dtype is torch.float64:
        bits, digits, infinite = values.view(torch.int64), 52, 0x7FF
    else:
        # Exact: f32 has every value of f16 and bf16.
        bits, digits, infinite = values.float().view(torch.int32), 23, 0xFF
    magnitude = bits & ((1 << (digits + infinite.bit_length())) - 1)
    exponent = magnitude >> digits
    slots = (exponent - ((infinite >> 1) + LOWEST - FIRST)).clamp_(BELOW, ABOVE)
    # What is not finite comes right after ABOVE, and zeros are slot 0.
    return slots.add_(exponent == infinite).mul_(magnitude != 0)
