"""From the facts of many tensors to one decision, in one launch.

Computes what `reference.decide` does: the norm of the unscaled gradients, the clip
coefficient, whether to skip, and the two numbers that fold unscaling and clipping into
an optimizer's pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.decision import FIELDS, Decision
from gradscale.torch.kernels.facts import TensorFacts
from gradscale.torch.kernels.launching import launched
from gradscale.torch.kernels.reading import TRITON_DTYPES

BLOCK = 1024
WARPS = 4


def decide(facts: TensorFacts, scale: Tensor, max_norm: float | None) -> Decision:
    """Return the decision on gradients that were read. No host sync.

    Args:
        facts: Of gradients that are still scaled; at least one. They must stay finite
            in their dtype once they are unscaled.
        scale: f32[], the scale behind them.
        max_norm: The largest norm to let through; None to let all through.
    """
    numbers = torch.empty(len(FIELDS), dtype=torch.float32, device=scale.device)
    _decide(
        1,
        (facts.peaks.view(torch.int32), facts.squares, scale, numbers),
        (facts.peaks.numel(), -1.0 if max_norm is None else max_norm),
        DTYPE=TRITON_DTYPES[facts.dtype],
        CLIP=max_norm is not None,
        # Here: what is tiny on the host may be 0 in f32.
        TO_ZERO=max_norm == 0.0,
        BLOCK=BLOCK,
    )
    return Decision(*numbers.unbind())


@triton.jit
def _is_finite(x):
    # By its bits: a fused multiply-add makes x - x the rounding error of x.
    return tl.abs(x).to(tl.int32, bitcast=True) < 0x7F800000


@launched(num_warps=WARPS, enable_fp_fusion=False)
def _decide(
    peaks_ptr,
    squares_ptr,
    scale_ptr,
    numbers_ptr,
    tensors,
    max_norm,
    DTYPE: tl.constexpr,
    CLIP: tl.constexpr,
    TO_ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Fresh memory is: the loads are then as wide as they can be.
    peaks_ptr = tl.multiple_of(peaks_ptr, 16)
    squares_ptr = tl.multiple_of(squares_ptr, 16)
    places = tl.arange(0, BLOCK)
    peaks = tl.zeros((BLOCK,), tl.int32)
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, tensors, BLOCK):
        inside = begin + places < tensors
        at = begin + places
        peaks = tl.maximum(peaks, tl.load(peaks_ptr + at, mask=inside, other=0))
        sums += tl.load(squares_ptr + at, mask=inside, other=0.0)
    amax = tl.max(peaks, axis=0).to(tl.float32, bitcast=True)
    scale = tl.load(scale_ptr)
    inverse = tl.div_rn(1.0, scale)
    norm = (tl.sqrt(tl.sum(sums, axis=0)) * inverse.to(tl.float64)).to(tl.float32)
    coef = 1.0
    norm_found = 0.0
    if CLIP:
        ratio = tl.div_rn(max_norm, norm + 1e-6)
        # A comparison with NaN is False: the coefficient then stays NaN.
        coef = tl.where(ratio > 1.0, 1.0, ratio)
        # The smallest normal f32: below, the multiplier loses digits.
        usable = coef * inverse >= 1.1754943508222875e-38
        if TO_ZERO:
            usable = _is_finite(norm)
        norm_found = tl.where(usable, 0.0, 1.0)
    multiplier = inverse * coef
    grad_scale = tl.div_rn(scale, coef)
    # As stored: rounding is monotonic, so the peak answers for all. Who multiplies and
    # who divides may differ in the last bit.
    times = (amax * multiplier).to(DTYPE).to(tl.float32)
    over = tl.div_rn(amax, grad_scale).to(DTYPE).to(tl.float32)
    found = tl.where(_is_finite(times) & _is_finite(over), 0.0, 1.0)
    tl.store(numbers_ptr + 0, found)
    tl.store(numbers_ptr + 1, norm_found)
    tl.store(numbers_ptr + 2, tl.maximum(found, norm_found))
    tl.store(numbers_ptr + 3, amax)
    tl.store(numbers_ptr + 4, norm)
    tl.store(numbers_ptr + 5, coef)
    tl.store(numbers_ptr + 6, multiplier)
    tl.store(numbers_ptr + 7, grad_scale)
