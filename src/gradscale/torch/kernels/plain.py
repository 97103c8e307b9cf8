"""Reference implementations of the kernels in plain torch operations. No host sync.

They run on any device. The optimizer passes accept any strides and process one tensor
at a time, so that only a few temporaries of one tensor's size exist at once. They
compute in the dtype of the state: f32, or f64 for f64 parameters. The end of a step is
in `gradscale.torch.device_state.update`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.kernels.args import (
    AdamConfig,
    AdamLists,
    AmpArgs,
    LionConfig,
    MomentumLists,
    SgdConfig,
)

# The smallest normal f32: below, a multiplier loses digits and ends at 0.
SMALLEST_MULTIPLIER = 2.0**-126
# The slots of an exponent histogram, as `count_tensors` describes them.
SLOTS = 64
ZEROS, BELOW, FIRST, ABOVE, NONFINITE, OUTSIDE = 0, 1, 2, 61, 62, 63
# 19 octaves below the smallest f16: elements that a scale 2^19 times as high saves.
LOWEST = -43
# Elements that are counted at once. On a CPU they stay in the cache with all
# temporaries, and torch starts no threads for so few; a GPU needs many, and the
# temporaries take 24 bytes for each.
PIECE, PIECE_ON_DEVICE = 2**15, 2**24


class TensorStats(NamedTuple):
    """The statistics of several tensors from one read, on their device.

    Kept as integers, in the memory that a kernel writes and a replayed graph rewrites.

    Attributes:
        dtype: The dtype of the tensors.
        peak_bits: i64[n], the bits of f32 `peaks`.
        square_bits: i64[n], the bits of f64 `squares`.
    """

    dtype: torch.dtype
    peak_bits: Tensor
    square_bits: Tensor

    @property
    def peaks(self) -> Tensor:
        """f32[n], the largest magnitude of each; NaN if it contains NaN."""
        return self.peak_bits.int().view(torch.float32)

    @property
    def squares(self) -> Tensor:
        """f64[n], the sum of squares of each."""
        return self.square_bits.view(torch.float64)


class Decision(NamedTuple):
    """The decision on one step. f32[] each, on the device.

    Attributes:
        nonfinite: 1 if a gradient is not finite, or would not be once multiplied; else
            0.
        norm_unusable: 1 if the norm or the multiplier is not a usable f32, else 0.
            Without a clip, plain operations leave it, `norm` and `coef` None.
        skip: 1 if either is 1, else 0.
        amax: The largest magnitude of the scaled gradients.
        norm: The norm of the unscaled gradients.
        coef: The clip coefficient, in [0, 1]; 1 without a clip.
        multiplier: `coef / scale`, which unscales and clips a gradient.
        grad_scale: `scale / coef`, the divisor for PyTorch's fused optimizers.
    """

    nonfinite: Tensor
    norm_unusable: Tensor | None
    skip: Tensor
    amax: Tensor
    norm: Tensor | None
    coef: Tensor | None
    multiplier: Tensor
    grad_scale: Tensor


def read_tensors(tensors: Sequence[Tensor]) -> TensorStats:
    """Return the statistics of the tensors from one read.

    Args:
        tensors: float[...] each, of one dtype and device, none of them empty.
    """
    # The maximum of magnitudes is exact, and NaN if any is NaN.
    peaks = torch.stack([tensor.abs().amax().float() for tensor in tensors])
    squares = torch.stack([tensor.double().square().sum() for tensor in tensors])
    bits = peaks.view(torch.int32).long(), squares.view(torch.int64)
    return TensorStats(tensors[0].dtype, *bits)


def clip_to(norm: Tensor, max_norm: float, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clip coefficient, and 1 if it or the norm is not usable, else 0.

    Args:
        norm: f32[], the norm of the unscaled gradients.
        max_norm: The maximum norm.
        factor: f32[], the other factor that multiplies the gradients.
    """
    # The same small number as torch.nn.utils.clip_grad_norm_.
    coef = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Also False where the norm is inf or NaN: the coefficient is then 0 or NaN.
    usable = coef * factor >= SMALLEST_MULTIPLIER
    if max_norm == 0.0:
        usable = torch.isfinite(norm)
    return coef, torch.logical_not(usable, out=torch.empty_like(norm))


def decide(stats: TensorStats, scale: Tensor, max_norm: float | None) -> Decision:
    """Return the decision on gradients that were read.

    Args:
        stats: Of gradients that are still scaled; at least one. They must stay finite
            in their dtype once they are unscaled.
        scale: f32[], the scale of the gradients.
        max_norm: The maximum norm; None for no clip.
    """
    amax, inverse = stats.peaks.amax(), scale.reciprocal()
    norm = (stats.squares.sum().sqrt() * inverse).float()
    coef, norm_unusable = torch.ones_like(scale), torch.zeros_like(scale)
    if max_norm is not None:
        coef, norm_unusable = clip_to(norm, max_norm, inverse)
    multiplier, grad_scale = inverse * coef, scale / coef
    # Rounded as stored. A product and a quotient may differ in the last bit.
    stored = torch.stack((amax * multiplier, amax / grad_scale)).to(stats.dtype)
    nonfinite = (~torch.isfinite(stored).all()).float()
    skip = torch.maximum(nonfinite, norm_unusable)
    return Decision(
        nonfinite, norm_unusable, skip, amax, norm, coef, multiplier, grad_scale
    )


def adam_(lists: AdamLists, config: AdamConfig, amp: AmpArgs) -> None:
    """Step by Adam or AdamW, or leave all unchanged."""
    skip = _skip(amp)
    wide = lists.exp_avgs[0].dtype
    taken = torch.stack(lists.steps).to(wide) + 1.0
    step_sizes = (config.lr / _one_minus_power(config.beta1, taken)).unbind()
    roots = _one_minus_power(config.beta2, taken).sqrt().unbind()
    for i, param in enumerate(lists.params):
        exact = lists.masters[i] if lists.masters else param
        grad = _unscaled(lists.grads[i], wide, amp, skip)
        if config.maximize:
            grad = -grad
        start = exact
        if config.weight_decay and config.decoupled:
            # Not start * (1 - lr * weight_decay): the rounding error of a factor so
            # close to 1 is a decay of its own.
            start = exact - exact * (config.lr * config.weight_decay)
        elif config.weight_decay:
            grad = grad + exact * config.weight_decay
        exp_avg = torch.lerp(lists.exp_avgs[i], grad, 1.0 - config.beta1)
        exp_avg_sq = torch.addcmul(
            lists.exp_avg_sqs[i] * config.beta2, grad, grad, value=1.0 - config.beta2
        )
        largest = exp_avg_sq
        if lists.max_exp_avg_sqs:
            largest = torch.maximum(lists.max_exp_avg_sqs[i], exp_avg_sq)
            _put_(lists.max_exp_avg_sqs[i], largest, skip)
        spread = (largest.sqrt() / roots[i]).add_(config.eps)
        stepped = start - (exp_avg / spread).mul_(step_sizes[i])
        _put_(lists.exp_avgs[i], exp_avg, skip)
        _put_(lists.exp_avg_sqs[i], exp_avg_sq, skip)
        _put_parameter_(param, exact, stepped, skip)
    count_(lists.steps, amp.found_inf)


def sgd_(lists: MomentumLists, config: SgdConfig, amp: AmpArgs) -> None:
    """Step by SGD, or leave all unchanged."""
    skip = _skip(amp)
    for i, param in enumerate(lists.params):
        exact = lists.masters[i] if lists.masters else param
        grad = _unscaled(lists.grads[i], exact.dtype, amp, skip)
        if config.maximize:
            grad = -grad
        if config.weight_decay:
            grad = grad + exact * config.weight_decay
        if lists.momenta:
            momentum = lists.momenta[i] * config.momentum + grad * (
                1.0 - config.dampening
            )
            if lists.steps:
                # The first step taken is not dampened.
                momentum = torch.where(lists.steps[i] == 0.0, grad, momentum)
            grad = grad + momentum * config.momentum if config.nesterov else momentum
            _put_(lists.momenta[i], momentum, skip)
        _put_parameter_(param, exact, exact - grad * config.lr, skip)
    count_(lists.steps, amp.found_inf)


def lion_(lists: MomentumLists, config: LionConfig, amp: AmpArgs) -> None:
    """Step by Lion, or leave all unchanged. arXiv 2302.06675, algorithm 2."""
    skip = _skip(amp)
    for i, param in enumerate(lists.params):
        exact = lists.masters[i] if lists.masters else param
        grad = _unscaled(lists.grads[i], exact.dtype, amp, skip)
        if config.maximize:
            grad = -grad
        start = exact
        if config.weight_decay:
            start = exact - exact * (config.lr * config.weight_decay)
        direction = torch.lerp(lists.momenta[i], grad, 1.0 - config.beta1).sign_()
        momentum = torch.lerp(lists.momenta[i], grad, 1.0 - config.beta2)
        _put_(lists.momenta[i], momentum, skip)
        _put_parameter_(param, exact, start - direction * config.lr, skip)


def _skip(amp: AmpArgs) -> Tensor | None:
    return None if amp.found_inf is None else amp.found_inf != 0.0


def _unscaled(
    grad: Tensor, wide: torch.dtype, amp: AmpArgs, skip: Tensor | None
) -> Tensor:
    if amp.grad_scale is None:
        return grad.to(wide)
    unscaled = grad.to(wide) / amp.grad_scale
    if amp.write_back:
        _put_(grad, unscaled, skip)
    return unscaled


def _one_minus_power(base: float, exponents: Tensor) -> Tensor:
    # 1 - 0.999 ** 1 in f32 has four digits left; expm1 keeps all of them.
    log = math.log(base) if base > 0.0 else -math.inf
    return -torch.expm1(exponents * log)


def _put_parameter_(
    param: Tensor, exact: Tensor, stepped: Tensor, skip: Tensor | None
) -> None:
    _put_(exact, stepped, skip)
    if param is not exact:
        _put_(param, stepped, skip)


def _put_(kept: Tensor, new: Tensor, skip: Tensor | None) -> None:
    kept.copy_(new if skip is None else torch.where(skip, kept, new.to(kept.dtype)))


def count_(steps: list[Tensor], found_inf: Tensor | None) -> None:
    """Add 1 to each f32[], unless `found_inf` is set.

    Args:
        steps: On one device.
        found_inf: f32[], 0 to count; None is 0.
    """
    if not steps:
        return
    if found_inf is None:
        torch._foreach_add_(steps, 1.0)
        return
    taken = (found_inf == 0.0).to(steps[0].dtype)
    # A list of tensors: some devices read a single one on the host.
    torch._foreach_add_(steps, [taken] * len(steps))


def count_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the number of elements of each tensor in each slot. No host sync.

    Slots: zeros, magnitudes below all bins, a bin for each exponent from `LOWEST` to
    15, finite magnitudes above, and inf with NaN. The last slot stays empty: kernels
    use it for positions outside of a tensor.

    Args:
        tensors: float[...] each, on one device and of one dtype, of any strides.

    Returns:
        i64[n, SLOTS], on that device.
    """
    return torch.stack([_histogram(tensor.detach().reshape(-1)) for tensor in tensors])


def _histogram(values: Tensor) -> Tensor:
    on_host = values.device.type == "cpu"
    tally = tally_on_host if on_host else tally_on_device
    pieces = values.split(PIECE if on_host else PIECE_ON_DEVICE)
    counts = [tally(_slots_of(piece)) for piece in pieces]
    return counts[0] if len(counts) == 1 else torch.stack(counts).sum(0)


def tally_on_host(slots: Tensor) -> Tensor:
    """Return i64[SLOTS], the number of elements in each slot. Syncs on a GPU."""
    return torch.bincount(slots, minlength=SLOTS)


def tally_on_device(slots: Tensor) -> Tensor:
    """As `tally_on_host`, without a sync. Integer sums do not depend on the order."""
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
    # NONFINITE comes right after ABOVE, and ZEROS is 0.
    return slots.add_(exponent == infinite).mul_(magnitude != 0)
