"""Exponent histograms of many tensors, in one read.

The counts equal those of `plain.count_tensors` in every run, because only integers are
added. Nothing is written to the tensors.
"""

import torch
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels import plain as slots
from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.pointers import locate, pointer
from gradscale.torch.kernels.read import TRITON_DTYPES

# As for the read of the gradients.
CHUNK = 8192
WARPS = 8


def count_tensors(table: Table, dtype: torch.dtype) -> Tensor:
    """Return the number of elements of each tensor in each slot. No host sync.

    Args:
        table: One list, in chunks of `CHUNK` elements.
        dtype: Of all its tensors: f32, f16 or bf16.

    Returns:
        i64[tensors, SLOTS], on their device.
    """
    counts = torch.zeros(
        (table.tensors, slots.SLOTS), dtype=torch.int64, device=table.cells.device
    )
    _count(
        table.chunks,
        (table.cells, table.owners, counts),
        (table.tensors,),
        DTYPE=TRITON_DTYPES[dtype],
        CHUNK=CHUNK,
        SLOTS=slots.SLOTS,
        # Biased by 127, as f32 stores an exponent.
        LOWEST=slots.LOWEST + 127 - slots.FIRST,
        ZEROS=slots.ZEROS,
        BELOW=slots.BELOW,
        ABOVE=slots.ABOVE,
        NONFINITE=slots.NONFINITE,
        OUTSIDE=slots.OUTSIDE,
    )
    return counts


@launched(num_warps=WARPS, enable_fp_fusion=True)
def _count(
    cells_ptr,
    owners_ptr,
    counts_ptr,
    tensors,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,
    LOWEST: tl.constexpr,
    ZEROS: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    NONFINITE: tl.constexpr,
    OUTSIDE: tl.constexpr,
):
    owner, start, left = locate(cells_ptr, owners_ptr, tensors, CHUNK)
    begin = tl.load(cells_ptr + 2 * tensors + owner)
    places = tl.arange(0, CHUNK)
    if begin % 16 == 0 and left >= CHUNK:
        grad = tl.load(pointer(begin, start, DTYPE, True) + places)
    else:
        grad_ptr = pointer(begin, start, DTYPE, False) + places
        grad = tl.load(grad_ptr, mask=places < left, other=0.0)
    if grad.dtype == tl.bfloat16:
        # Not converted: the interpreter misreads subnormal bf16.
        bits = grad.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = grad.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    slot = tl.minimum(tl.maximum(exponent - LOWEST, BELOW), ABOVE)
    slot = tl.where(magnitude == 0, ZEROS, slot)
    slot = tl.where(exponent == 255, NONFINITE, slot)
    slot = tl.where(places < left, slot, OUTSIDE)
    found = tl.histogram(slot, SLOTS)
    each = tl.arange(0, SLOTS)
    # int64: the row of a table of many tensors, and counts beyond 2**31.
    row_ptr = counts_ptr + owner.to(tl.int64) * SLOTS
    filled = (found > 0) & (each != OUTSIDE)
    # Integers: any order gives the same sum.
    tl.atomic_add(row_ptr + each, found.to(tl.int64), mask=filled, sem="relaxed")
