"""One read of many tensors: for each its peak and its sum of squares.

Nothing is written to the tensors, and two runs give the same bits: partial results are
added up in a fixed order. The peak is the largest bit pattern of |x| as an integer,
which orders finite < inf < NaN. Squares are taken of x / 2^e, where 2^e is the power
of two below the chunk's peak, and added up in f32 within a chunk and in f64 beyond: no
sum overflows, and none underflows, unless the norm does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels import on
from gradscale.torch.kernels.facts import (
    Parts,
    TensorFacts,
    Tiling,
    even,
    peaks_and_squares,
)
from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.pointers import pointer

# Elements of a chunk, and warps: swept in benchmarks/results/kernels_h200.json.
CHUNK = 8192
WARPS = 8
# Partial results that a program adds up at once, of one large tensor or of some small
# ones. Among thousands of tensors, a large one has to make do with few. On an H200 it
# takes 6.1 us for 124 M parameters in 148 tensors, with 1024 and 16 slices 7.2; 4.8 us
# for 4000 tensors of one chunk, with a program for each 15.4.
PARTIALS, OF_SMALL, FEW_PARTIALS = 2048, 1024, 512
# Programs that share a large tensor, at most: who decides looks at all they found. And
# how many there may be in all.
SLICES, PROGRAMS = 4, 2048

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def read_tensors(table: Table, dtype: torch.dtype) -> TensorFacts:
    """Read the tensors of a table once, as `reference.read_tensors` does. No host sync.

    What was read of each chunk is not gathered yet: `deciding.decide` does it in its
    own launch, and who asks for the facts before has it done.

    Args:
        table: Of one list; chunks of `CHUNK` elements.
        dtype: That of all its tensors: f32, f16 or bf16.
    """
    tiling = tiling_of(table)
    rooms = rooms_of(table.tensors, tiling.slices)
    device = table.cells.device
    cells = torch.empty(2 * table.chunks, dtype=torch.int64, device=device)
    each = torch.empty(rooms, dtype=torch.int64, device=device)
    _read(
        table.chunks,
        (table.cells, table.owners, cells, each),
        (table.tensors, table.chunks, rooms - 1),
        DTYPE=TRITON_DTYPES[dtype],
        CHUNK=CHUNK,
    )
    parts = Parts(table, cells, each, tiling, gather)
    return TensorFacts(dtype, parts=parts)


def tiling_of(table: Table) -> Tiling:
    """Return how the partial results of these tensors are to be gathered."""
    most = PARTIALS if table.chunks >= 8 * table.tensors else FEW_PARTIALS
    partials = min(_power_of_2(table.most), most)
    tensors = max(OF_SMALL // partials, 1)
    wanted = _power_of_2(-(-table.most // partials))
    room = max(PROGRAMS * tensors // table.tensors, 1)
    # Powers of two, so that not every number of tensors has a kernel of its own.
    slices = min(wanted, SLICES, 2 ** (room.bit_length() - 1))
    return Tiling(tensors, partials, slices)


def _power_of_2(least: int) -> int:
    """Return the smallest that is not below; Triton's own takes some microseconds."""
    return 1 << (least - 1).bit_length()


def rooms_of(tensors: int, slices: int) -> int:
    """Return how many numbers there are to be room for in `Parts.each`."""
    return 2 * even(tensors) * (1 if slices == 1 else 1 + slices) + 1


def gather(parts: Parts) -> tuple[Tensor, Tensor]:
    """Return the peaks and the sums of squares of each tensor. No host sync."""
    table, tiling = parts.table, parts.tiling
    with on(parts.each.device):
        _gather(
            -(-table.tensors // tiling.tensors),
            (table.cells, parts.cells, parts.each),
            (table.tensors, table.chunks, even(table.tensors)),
            CHUNK=CHUNK,
            TENSORS=tiling.tensors,
            PARTIALS=tiling.partials,
            SLICES=tiling.slices,
        )
    return peaks_and_squares(parts.each, table.tensors)


# Fusion is said aloud: Triton's default is in flux.
@launched(num_warps=WARPS, enable_fp_fusion=True)
def _read(
    cells_ptr,
    owners_ptr,
    parts_ptr,
    each_ptr,
    tensors,
    chunks,
    done,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    owner = tl.load(owners_ptr + chunk)
    numel = tl.load(cells_ptr + owner)
    first = tl.load(cells_ptr + tensors + owner)
    address = tl.load(cells_ptr + 2 * tensors + owner)
    # int64: one tensor may hold more than 2**31 elements.
    start = (chunk - first) * CHUNK
    places = tl.arange(0, CHUNK)
    if address % 16 == 0 and numel - start >= CHUNK:
        grad = tl.load(pointer(address, start, DTYPE, True) + places)
    else:
        grad_ptr = pointer(address, start, DTYPE, False) + places
        grad = tl.load(grad_ptr, mask=places < numel - start, other=0.0)
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


@launched(num_warps=WARPS, enable_fp_fusion=True)
def _gather(
    cells_ptr,
    parts_ptr,
    each_ptr,
    tensors,
    chunks,
    even_tensors,
    CHUNK: tl.constexpr,
    TENSORS: tl.constexpr,
    PARTIALS: tl.constexpr,
    SLICES: tl.constexpr,
):
    owners = tl.program_id(0) * TENSORS + tl.arange(0, TENSORS)
    peaks = tl.zeros((TENSORS,), tl.int64)
    sums = tl.zeros((TENSORS,), tl.float64)
    # In the order in which `deciding` adds up what several programs have gathered.
    for piece in tl.static_range(SLICES):
        found, squares = gather_slice(
            cells_ptr,
            parts_ptr,
            tensors,
            chunks,
            owners,
            piece,
            CHUNK,
            TENSORS,
            PARTIALS,
            SLICES,
        )
        peaks = tl.maximum(peaks, found)
        sums += squares
    there = owners < tensors
    tl.store(each_ptr + owners, sums.to(tl.int64, bitcast=True), mask=there)
    tl.store(each_ptr + even_tensors + owners, peaks, mask=there)


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
