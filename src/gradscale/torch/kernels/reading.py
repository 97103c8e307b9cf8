"""One read of many tensors: for each its peak and its sum of squares.

Nothing is written to the tensors, and two runs give the same bits: partial results are
added up in a fixed order. The peak is the largest bit pattern of |x| as an integer,
which orders finite < inf < NaN. Squares are taken of x / 2^e, where 2^e is the power
of two below the chunk's peak, and added up in f32 within a chunk and in f64 beyond: no
sum overflows, and none underflows, unless the norm does.
"""

import torch
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.chunks import pointer
from gradscale.torch.kernels.launching import launched
from gradscale.torch.kernels.tables import Table

# Elements of a chunk, and warps: swept in benchmarks/results/kernels_h200.json.
CHUNK = 8192
WARPS = 8
# Partial results that a program adds up at once.
PARTIALS = 1024

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def read_tensors(table: Table, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Read the tensors of a table once, as `reference.read_tensors` does. No host sync.

    Args:
        table: Of one list; chunks of `CHUNK` elements.
        dtype: That of all its tensors: f32, f16 or bf16.

    Returns:
        f32[n], the largest magnitude of each, NaN if there is one; f64[n], the sum of
        squares of each.
    """
    device = table.cells.device
    parts = torch.empty(table.chunks, dtype=torch.int32, device=device)
    sums = torch.empty(table.chunks, dtype=torch.float64, device=device)
    peaks = torch.empty(table.tensors, dtype=torch.int32, device=device)
    squares = torch.empty(table.tensors, dtype=torch.float64, device=device)
    _read(
        table.chunks,
        (table.cells, table.owners, parts, sums),
        (table.tensors,),
        DTYPE=TRITON_DTYPES[dtype],
        CHUNK=CHUNK,
    )
    _gather(
        table.tensors,
        (table.cells, parts, sums, peaks, squares),
        (table.tensors,),
        CHUNK=CHUNK,
        BLOCK=PARTIALS,
    )
    return peaks.view(torch.float32), squares


# Fusion is said aloud: Triton's default is in flux.
@launched(num_warps=WARPS, enable_fp_fusion=True)
def _read(
    cells_ptr,
    owners_ptr,
    parts_ptr,
    sums_ptr,
    tensors,
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
    tl.store(parts_ptr + chunk, peak)
    tl.store(sums_ptr + chunk, total * up.to(tl.float64, bitcast=True))


@launched(num_warps=WARPS, enable_fp_fusion=True)
def _gather(
    cells_ptr,
    parts_ptr,
    sums_ptr,
    peaks_ptr,
    squares_ptr,
    tensors,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    owner = tl.program_id(0)
    chunks = (tl.load(cells_ptr + owner) + (CHUNK - 1)) // CHUNK
    first = tl.load(cells_ptr + tensors + owner)
    places = tl.arange(0, BLOCK)
    peaks = tl.zeros((BLOCK,), tl.int32)
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, chunks, BLOCK):
        inside = begin + places < chunks
        at = first + begin + places
        peaks = tl.maximum(peaks, tl.load(parts_ptr + at, mask=inside, other=0))
        sums += tl.load(sums_ptr + at, mask=inside, other=0.0)
    tl.store(peaks_ptr + owner, tl.max(peaks, axis=0))
    tl.store(squares_ptr + owner, tl.sum(sums, axis=0))
