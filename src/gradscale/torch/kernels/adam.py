"""One pass of Adam or AdamW over many tensors: unscale, update, or skip.

One kernel body, compiled in two ways.

For gradscale's optimizers it computes the result of `plain.adam_`. Each gradient,
moment and parameter is read once and written once; gradients are written only with
`write_back`.

With EXACT it gives the bits of torch's fused Adam and AdamW on CUDA. Every operation is
rounded, and multiply-adds are fused where torch's compiler fuses them. CUDA's `powf`
has no equivalent here, so torch raises the betas to the step count of the first tensor,
which all tensors usually share; for other counts they are raised in f64, which is more
precise. Torch increments the step counts before the pass.

If `found_inf` is set, nothing else is read or written.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.args import CHUNK, AdamConfig, AmpArgs
from gradscale.torch.kernels.launch import Launch
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.pointers import (
    address,
    locate,
    mask,
    one_minus_exp,
    pointer,
)
from gradscale.torch.kernels.read import TRITON_DTYPES

# Swept in benchmarks/results/kernels_h200.json.
WARPS = 4


def launch_(
    table: Table,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    config: AdamConfig,
    amp: AmpArgs,
    *,
    masters: bool,
    amsgrad: bool,
    powers: Tensor | None = None,
) -> None:
    """Launch the pass. No host sync.

    Args:
        table: Rows: parameters, gradients, exp_avg, exp_avg_sq, then max_exp_avg_sq
            and masters where there are any, then step counts.
        param_dtype, grad_dtype: f32, f16 or bf16.
        config, amp: As in `plain.adam_`.
        masters, amsgrad: Whether there are such rows.
        powers: f32[2], the betas raised to the step count of the first tensor: launches
            the EXACT kernel, for f32 tensors without masters.
    """
    lr, scale, found = config.lr, amp.grad_scale, amp.found_inf
    # Passed where an argument is not used.
    unused = table.cells
    exact = powers is not None
    (_exact if exact else _own)(
        table.chunks,
        (
            table.cells,
            table.owners,
            unused if scale is None else scale,
            unused if found is None else found,
            lr if isinstance(lr, Tensor) else unused,
            unused if powers is None else powers,
        ),
        (
            table.tensors,
            0.0 if isinstance(lr, Tensor) else float(lr),
            float(config.beta1),
            1.0 - config.beta1,
            float(config.beta2),
            1.0 - config.beta2,
            log_of(config.beta1),
            log_of(config.beta2),
            float(config.eps),
            float(config.weight_decay),
        ),
        PARAM=TRITON_DTYPES[param_dtype],
        GRAD=TRITON_DTYPES[grad_dtype],
        LR_TENSOR=isinstance(lr, Tensor),
        SCALED=scale is not None,
        CHECKED=found is not None,
        DECAY=config.weight_decay != 0.0,
        DECOUPLED=config.decoupled,
        MAXIMIZE=config.maximize,
        MASTERS=masters,
        AMSGRAD=amsgrad,
        WRITE_BACK=amp.write_back and scale is not None,
        EXACT=exact,
        CHUNK=CHUNK,
    )


def log_of(beta: float) -> float:
    """Return the logarithm, -inf for 0."""
    return math.log(beta) if beta > 0.0 else -math.inf


@triton.jit
def _power(base, exponent):
    return tl.exp(tl.log(tl.full((), base, tl.float64)) * exponent).to(tl.float32)


def _adam(
    cells_ptr,
    owners_ptr,
    scale_ptr,
    found_ptr,
    lr_ptr,
    powers_ptr,
    tensors,
    lr,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    log_beta1,
    log_beta2,
    eps,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    LR_TENSOR: tl.constexpr,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASTERS: tl.constexpr,
    AMSGRAD: tl.constexpr,
    WRITE_BACK: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if CHECKED:
        # A flag of another library may be a count.
        if tl.load(found_ptr) != 0.0:
            return
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr)
    if LR_TENSOR:
        lr = tl.load(lr_ptr).to(tl.float32)
    owner, start, left = locate(cells_ptr, owners_ptr, tensors, CHUNK)
    param = address(cells_ptr, tensors, owner, 2)
    grad = address(cells_ptr, tensors, owner, 3)
    avg = address(cells_ptr, tensors, owner, 4)
    square = address(cells_ptr, tensors, owner, 5)
    step = address(cells_ptr, tensors, owner, 6 + AMSGRAD + MASTERS)
    largest = square
    master = param
    if AMSGRAD:
        largest = address(cells_ptr, tensors, owner, 6)
    if MASTERS:
        master = address(cells_ptr, tensors, owner, 6 + AMSGRAD)
    steps = tl.load(step.to(tl.pointer_type(tl.float32)))
    if EXACT:
        first = address(cells_ptr, tensors, 0, 6 + AMSGRAD)
        power1, power2 = tl.load(powers_ptr), tl.load(powers_ptr + 1)
        if steps != tl.load(first.to(tl.pointer_type(tl.float32))):
            power1, power2 = _power(beta1, steps), _power(beta2, steps)
        step_size = tl.div_rn(lr, 1.0 - power1)
        # The square root itself, by which EXACT divides.
        bias2 = tl.sqrt_rn(1.0 - power2)
    else:
        steps += 1.0
        step_size = lr / one_minus_exp(steps * log_beta1)
        # The inverse of the square root.
        bias2 = tl.rsqrt(one_minus_exp(steps * log_beta2))
    if (param | grad | avg | square | largest | master) % 16 == 0 and left >= CHUNK:
        _chunk(param, grad, avg, square, largest, master, start, left, scale, lr,
               step_size, bias2, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
               weight_decay, PARAM, GRAD, SCALED, DECAY, DECOUPLED, MAXIMIZE, MASTERS,
               AMSGRAD, WRITE_BACK, EXACT, CHUNK, True)  # fmt: skip
    else:
        _chunk(param, grad, avg, square, largest, master, start, left, scale, lr,
               step_size, bias2, beta1, one_minus_beta1, beta2, one_minus_beta2, eps,
               weight_decay, PARAM, GRAD, SCALED, DECAY, DECOUPLED, MAXIMIZE, MASTERS,
               AMSGRAD, WRITE_BACK, EXACT, CHUNK, False)  # fmt: skip


@triton.jit
def _chunk(
    param,
    grad,
    avg,
    square,
    largest,
    master,
    start,
    left,
    scale,
    lr,
    step_size,
    bias2,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    SCALED: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASTERS: tl.constexpr,
    AMSGRAD: tl.constexpr,
    WRITE_BACK: tl.constexpr,
    EXACT: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
):
    places = tl.arange(0, CHUNK)
    inside = mask(places, left, CHUNK, FULL)
    param_ptr = pointer(param, start, PARAM, FULL) + places
    grad_ptr = pointer(grad, start, GRAD, FULL) + places
    avg_ptr = pointer(avg, start, tl.float32, FULL) + places
    square_ptr = pointer(square, start, tl.float32, FULL) + places
    g = tl.load(grad_ptr, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        g = tl.div_rn(g, scale)
    if WRITE_BACK:
        tl.store(grad_ptr, g.to(GRAD), mask=inside)
    if MAXIMIZE:
        g = -g
    if MASTERS:
        master_ptr = pointer(master, start, tl.float32, FULL) + places
        p = tl.load(master_ptr, mask=inside, other=0.0)
    else:
        p = tl.load(param_ptr, mask=inside, other=0.0)
    m = tl.load(avg_ptr, mask=inside, other=0.0)
    v = tl.load(square_ptr, mask=inside, other=0.0)
    if DECAY:
        if DECOUPLED:
            if EXACT:
                p = tl.fma(-(lr * weight_decay), p, p)
            else:
                p -= lr * weight_decay * p
        else:
            if EXACT:
                g = tl.fma(p, weight_decay, g)
            else:
                g += weight_decay * p
    if EXACT:
        m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
        v = tl.fma(beta2, v, tl.fma(-beta2, g * g, g * g))
    else:
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * g * g
    tl.store(avg_ptr, m, mask=inside)
    tl.store(square_ptr, v, mask=inside)
    if AMSGRAD:
        largest_ptr = pointer(largest, start, tl.float32, FULL) + places
        before = tl.load(largest_ptr, mask=inside, other=0.0)
        if EXACT:
            # std::max of C++: a NaN stays.
            v = tl.where(before < v, v, before)
        else:
            v = tl.maximum(v, before)
        tl.store(largest_ptr, v, mask=inside)
    if EXACT:
        p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), bias2) + eps)
    else:
        p -= step_size * m / (tl.sqrt_rn(v) * bias2 + eps)
    if MASTERS:
        tl.store(master_ptr, p, mask=inside)
    tl.store(param_ptr, p.to(PARAM), mask=inside)


# Set explicitly: Triton's default for FP fusion changes between versions.
_own = Launch(_adam, {"num_warps": WARPS, "enable_fp_fusion": True})
# Multiply-adds are fused only where `tl.fma` is written.
_exact = Launch(_adam, {"num_warps": WARPS, "enable_fp_fusion": False})
