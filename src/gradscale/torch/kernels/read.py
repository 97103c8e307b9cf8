"""One read of many tensors: for each its peak and its sum of squares.

The tensors are not written to, unless the same pass is to unscale them. Two runs give
the same bits: partial results are added up in a fixed order. The peak is the largest
bit pattern of |x| as an integer, which orders finite < inf < NaN. Squares are taken of
x / 2^e, where 2^e is the power of two below the chunk's peak, and added up in f32
within a chunk and in f64 beyond: no sum overflows, and none underflows, unless the norm
does.

The read leaves partial results for each chunk; `decide` gathers them.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.pointers import pointer

# Elements of a chunk, and warps: swept in benchmarks/results/kernels_h200.json.
CHUNK = 8192
WARPS = 8
# Partial results that a program adds up at once: of one large tensor, of several small
# ones, and of a large one among thousands. On an H200, 124 M parameters in 148 tensors
# take 6.1 us (7.2 us with 1024 and 16 slices), and 4000 tensors of one chunk 4.8 us
# (15.4 us with a program for each).
PARTIALS, OF_SMALL, FEW_PARTIALS = 2048, 1024, 512
# The maximum number of programs per tensor, whose results the deciding program all
# reads, and the maximum number of programs in total.
SLICES, PROGRAMS = 4, 2048

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class Tiling(NamedTuple):
    """The division of the partial results of a read among programs.

    Attributes:
        tensors: Tensors that a program gathers.
        partials: Partial results of each that it adds up at once.
        slices: Programs that share the results of one tensor.
    """

    tensors: int
    partials: int
    slices: int


class PartialStats(NamedTuple):
    """The partial results of a read.

    Attributes:
        table: The table of the tensors. Gather the results before it changes.
        chunks: i64[2 * chunks], for each chunk the sum of squares as bits of an f64,
            then for each the largest magnitude as bits of an f32.
        each: i64[...], space for the same two values of each tensor, of its slices if
            it has more than one, and for the count of finished programs, initially 0.
        tiling: How the chunks are gathered.
    """

    table: Table
    chunks: Tensor
    each: Tensor
    tiling: Tiling


def read_chunks(
    table: Table, dtype: torch.dtype, unscale: Tensor | None = None
) -> PartialStats:
    """Read the tensors of a table once. No host sync.

    Args:
        table: Of one list; chunks of `CHUNK` elements.
        dtype: That of all its tensors: f32, f16 or bf16.
        unscale: f32[], also multiply the tensors by its inverse, in place; None to
            write nothing. The results are those of the tensors before.
    """
    tiling = tiling_of(table.tensors, table.chunks, table.most)
    parts = 1 if tiling.slices == 1 else 1 + tiling.slices
    size = 2 * aligned(table.tensors) * parts + 1
    device = table.cells.device
    chunks = torch.empty(2 * table.chunks, dtype=torch.int64, device=device)
    each = torch.empty(size, dtype=torch.int64, device=device)
    _read(
        table.chunks,
        # Without a scale the last pointer is not used.
        (table.cells, table.owners, chunks, each, each if unscale is None else unscale),
        (table.tensors, table.chunks, size - 1),
        DTYPE=TRITON_DTYPES[dtype],
        CHUNK=CHUNK,
        UNSCALE=unscale is not None,
    )
    return PartialStats(table, chunks, each, tiling)


@lru_cache
def tiling_of(tensors: int, chunks: int, most: int) -> Tiling:
    """Return how the partial results are to be gathered.

    Args:
        tensors: The number of tensors.
        chunks: The number of chunks of all tensors.
        most: The number of chunks of the largest tensor.
    """
    limit = PARTIALS if chunks >= 8 * tensors else FEW_PARTIALS
    partials = min(_power_of_2(most), limit)
    gathered = max(OF_SMALL // partials, 1)
    wanted = _power_of_2(-(-most // partials))
    room = max(PROGRAMS * gathered // tensors, 1)
    # A power of two, which limits the number of compiled kernels.
    slices = min(wanted, SLICES, 2 ** (room.bit_length() - 1))
    return Tiling(gathered, partials, slices)


def _power_of_2(least: int) -> int:
    """Return the next power of 2; Triton's own function takes some microseconds."""
    return 1 << (least - 1).bit_length()


def aligned(tensors: int) -> int:
    """Return the index of the peaks in `PartialStats.each`: a multiple of 16 bytes."""
    return tensors + tensors % 2


# Set explicitly: Triton's default for FP fusion changes between versions.
@launched(num_warps=WARPS, enable_fp_fusion=True)
def _read(
    cells_ptr,
    owners_ptr,
    parts_ptr,
    each_ptr,
    scale_ptr,
    tensors,
    chunks,
    done,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    UNSCALE: tl.constexpr,
):
    chunk = tl.program_id(0)
    owner = tl.load(owners_ptr + chunk)
    numel = tl.load(cells_ptr + owner)
    first = tl.load(cells_ptr + tensors + owner)
    address = tl.load(cells_ptr + 2 * tensors + owner)
    # int64: one tensor may hold more than 2**31 elements.
    start = (chunk - first) * CHUNK
    places = tl.arange(0, CHUNK)
    inverse = 1.0
    if UNSCALE:
        inverse = tl.div_rn(1.0, tl.load(scale_ptr))
    if address % 16 == 0 and numel - start >= CHUNK:
        grad_ptr = pointer(address, start, DTYPE, True) + places
        grad = tl.load(grad_ptr)
        if UNSCALE:
            tl.store(grad_ptr, (grad.to(tl.float32) * inverse).to(DTYPE))
    else:
        grad_ptr = pointer(address, start, DTYPE, False) + places
        inside = places < numel - start
        grad = tl.load(grad_ptr, mask=inside, other=0.0)
        if UNSCALE:
            tl.store(grad_ptr, (grad.to(tl.float32) * inverse).to(DTYPE), mask=inside)
    wide = tl.abs(grad.to(tl.float32))
    peak = tl.max(wide.to(tl.int32, bitcast=True), axis=0)
    # The peak's own exponent; 253 at most, where the factor is the smallest normal.
    exponent = tl.minimum(peak >> 23, 253)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    small = wide * down
    total = tl.sum(small * small, axis=0).to(tl.float64)
    up = (exponent * 2 + (1023 - 254)).to(tl.int64) << 52
    total *= up.to(tl.float64, bitcast=True)
    tl.store(parts_ptr + chunk, total.to(tl.int64, bitcast=True))
    tl.store(parts_ptr + chunks + chunk, peak.to(tl.int64))
    if chunk == 0:
        tl.store(each_ptr + done, 0)


@triton.jit
def gather_slice(
    cells_ptr,
    parts_ptr,
    tensors,
    chunks,
    owners,
    piece,
    CHUNK: tl.constexpr,
    TENSORS: tl.constexpr,
    PARTIALS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Return bits of the peaks, and sums of squares, of a slice of some tensors."""
    there = owners < tensors
    own = tl.load(cells_ptr + owners, mask=there, other=0)
    own = (own + (CHUNK - 1)) // CHUNK
    first = tl.load(cells_ptr + tensors + owners, mask=there, other=0)
    places = tl.arange(0, PARTIALS)
    peaks = tl.zeros((TENSORS, PARTIALS), tl.int64)
    sums = tl.zeros((TENSORS, PARTIALS), tl.float64)
    for begin in range(piece * PARTIALS, tl.max(own, axis=0), SLICES * PARTIALS):
        inside = begin + places[None, :] < own[:, None]
        at = first[:, None] + (begin + places[None, :])
        peak = tl.load(parts_ptr + chunks + at, mask=inside, other=0)
        square = tl.load(parts_ptr + at, mask=inside, other=0)
        peaks = tl.maximum(peaks, peak)
        sums += square.to(tl.float64, bitcast=True)
    return tl.max(peaks, axis=1), tl.sum(sums, axis=1)
