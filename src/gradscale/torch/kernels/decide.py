"""Reduces the partial results of a read to one decision, in one launch.

Each program gathers the results of several small tensors, or a slice of those of a
large one; the program that ends last combines the slices and decides.

Computes what `plain.decide` does: the norm of the unscaled gradients, the clip
coefficient, whether to skip, and the two numbers that fold unscaling and clipping into
an optimizer's pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.plain import Decision, TensorStats
from gradscale.torch.kernels.read import (
    CHUNK,
    TRITON_DTYPES,
    WARPS,
    PartialStats,
    aligned,
    gather_slice,
)

# Tensors whose results are combined at once.
BLOCK, FEW = 1024, 256


def gather_and_decide(
    partial: PartialStats, dtype: torch.dtype, scale: Tensor, max_norm: float | None
) -> tuple[TensorStats, Decision]:
    """Return the statistics of each tensor, and the decision. No host sync.

    Args:
        partial: The results for gradients that are still scaled; at least one.
        dtype: The dtype of the gradients, in which they must be finite once unscaled.
        scale: f32[], the scale of the gradients.
        max_norm: The maximum norm; None for no clip.
    """
    table, tiling = partial.table, partial.tiling
    groups = -(-table.tensors // tiling.tensors)
    fields = len(Decision._fields)
    numbers = torch.empty(fields, dtype=torch.float32, device=scale.device)
    _gather_and_decide(
        groups * tiling.slices,
        (table.cells, partial.chunks, partial.each, scale, numbers),
        (
            table.tensors,
            table.chunks,
            aligned(table.tensors),
            groups,
            -1.0 if max_norm is None else max_norm,
        ),
        CHUNK=CHUNK,
        TENSORS=tiling.tensors,
        PARTIALS=tiling.partials,
        SLICES=tiling.slices,
        DTYPE=TRITON_DTYPES[dtype],
        CLIP=max_norm is not None,
        # Compared on the host: a tiny number may be 0 in f32.
        TO_ZERO=max_norm == 0.0,
        BLOCK=FEW if table.tensors <= FEW else BLOCK,
    )
    begin, count = aligned(table.tensors), table.tensors
    stats = TensorStats(dtype, partial.each[begin:][:count], partial.each[:count])
    return stats, Decision._make(numbers.unbind())


@triton.jit
def _is_finite(x):
    # By its bits: a fused multiply-add makes x - x the rounding error of x.
    return tl.abs(x).to(tl.int32, bitcast=True) < 0x7F800000


@launched(num_warps=WARPS, enable_fp_fusion=False)
def _gather_and_decide(
    cells_ptr,
    parts_ptr,
    each_ptr,
    scale_ptr,
    numbers_ptr,
    tensors,
    chunks,
    even_tensors,
    groups,
    max_norm,
    CHUNK: tl.constexpr,
    TENSORS: tl.constexpr,
    PARTIALS: tl.constexpr,
    SLICES: tl.constexpr,
    DTYPE: tl.constexpr,
    CLIP: tl.constexpr,
    TO_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    piece = program // groups
    owners = (program % groups) * TENSORS + tl.arange(0, TENSORS)
    own_peaks, own_sums = gather_slice(
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
    # Slices follow the results of whole tensors; a single slice is the whole.
    slices_ptr = each_ptr
    if SLICES > 1:
        slices_ptr += 2 * even_tensors
    mine_ptr = slices_ptr + 2 * even_tensors * piece + owners
    there = owners < tensors
    tl.store(mine_ptr, own_sums.to(tl.int64, bitcast=True), mask=there)
    tl.store(mine_ptr + even_tensors, own_peaks, mask=there)
    # All threads write before one of them increments the count. Its acquire-release
    # order makes the writes of all programs visible to the last one.
    tl.debug_barrier()
    done_ptr = slices_ptr + 2 * even_tensors * SLICES
    before = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
    if before == groups * SLICES - 1:
        places = tl.arange(0, BLOCK)
        peaks = tl.zeros((BLOCK,), tl.int64)
        sums = tl.zeros((BLOCK,), tl.float64)
        for begin in range(0, tensors, BLOCK):
            inside = begin + places < tensors
            at_ptr = slices_ptr + begin + places
            one_sum = tl.zeros((BLOCK,), tl.float64)
            one_peak = tl.zeros((BLOCK,), tl.int64)
            # Unrolled, so that no load waits for another.
            for _ in tl.static_range(SLICES):
                # Bypasses L1, which does not see the writes of other multiprocessors.
                square = tl.load(at_ptr, mask=inside, other=0, cache_modifier=".cg")
                at_ptr += even_tensors
                peak = tl.load(at_ptr, mask=inside, other=0, cache_modifier=".cg")
                at_ptr += even_tensors
                one_sum += square.to(tl.float64, bitcast=True)
                one_peak = tl.maximum(one_peak, peak)
            if SLICES > 1:
                whole_ptr = each_ptr + begin + places
                bits = one_sum.to(tl.int64, bitcast=True)
                tl.store(whole_ptr, bits, mask=inside)
                tl.store(whole_ptr + even_tensors, one_peak, mask=inside)
            sums += one_sum
            peaks = tl.maximum(peaks, one_peak)
        peak = tl.max(peaks, axis=0).to(tl.int32)
        amax = peak.to(tl.float32, bitcast=True)
        total = tl.sum(sums, axis=0)
        _store(amax, total, scale_ptr, numbers_ptr, max_norm, DTYPE, CLIP, TO_ZERO)
        tl.store(done_ptr, 0)


@triton.jit
def _store(
    amax,
    total,
    scale_ptr,
    numbers_ptr,
    max_norm,
    DTYPE: tl.constexpr,
    CLIP: tl.constexpr,
    TO_ZERO: tl.constexpr,
):
    scale = tl.load(scale_ptr)
    inverse = tl.div_rn(1.0, scale)
    norm = (tl.sqrt(total) * inverse.to(tl.float64)).to(tl.float32)
    coef = 1.0
    norm_unusable = 0.0
    if CLIP:
        ratio = tl.div_rn(max_norm, norm + 1e-6)
        # A comparison with NaN is False: the coefficient then stays NaN.
        coef = tl.where(ratio > 1.0, 1.0, ratio)
        # The smallest normal f32: below, the multiplier loses digits.
        usable = coef * inverse >= 1.1754943508222875e-38
        if TO_ZERO:
            usable = _is_finite(norm)
        norm_unusable = tl.where(usable, 0.0, 1.0)
    multiplier = inverse * coef
    grad_scale = tl.div_rn(scale, coef)
    # Rounded as stored. Rounding is monotonic: if the peak stays finite, all elements
    # do. A product and a quotient may differ in the last bit.
    times = (amax * multiplier).to(DTYPE).to(tl.float32)
    over = tl.div_rn(amax, grad_scale).to(DTYPE).to(tl.float32)
    nonfinite = tl.where(_is_finite(times) & _is_finite(over), 0.0, 1.0)
    tl.store(numbers_ptr + 0, nonfinite)
    tl.store(numbers_ptr + 1, norm_unusable)
    tl.store(numbers_ptr + 2, tl.maximum(nonfinite, norm_unusable))
    tl.store(numbers_ptr + 3, amax)
    tl.store(numbers_ptr + 4, norm)
    tl.store(numbers_ptr + 5, coef)
    tl.store(numbers_ptr + 6, multiplier)
    tl.store(numbers_ptr + 7, grad_scale)
