"""One pass of Adam or AdamW over many tensors: unscale, clip, update, count.

Computes what `reference.adam_` does. Each gradient, moment and parameter is read once
and written once; the gradient is not written unless that is asked for. Where the flag
says skip, nothing is read or written.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.args import CHUNK, AdamConfig, AmpArgs
from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.pointers import (
    address,
    locate,
    one_minus_exp,
    pointer,
    unscaled,
    within,
)
from gradscale.torch.kernels.read import TRITON_DTYPES

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
) -> None:
    """Launch the pass. No host sync.

    Args:
        table: Rows: parameters, gradients, exp_avg, exp_avg_sq, then max_exp_avg_sq
            and masters where there are any, then steps.
        param_dtype, grad_dtype: f32, f16 or bf16.
        config, amp: As in `reference.adam_`.
        masters, amsgrad: Whether there are such rows.
    """
    lr, scale, found = config.lr, amp.grad_scale, amp.found_inf
    # An argument that is not looked at.
    unused = table.cells
    _adam(
        table.chunks,
        (
            table.cells,
            table.owners,
            unused if scale is None else scale,
            unused if found is None else found,
            lr if isinstance(lr, Tensor) else unused,
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
        CHUNK=CHUNK,
    )


def log_of(beta: float) -> float:
    """Return the logarithm, -inf for 0."""
    return math.log(beta) if beta > 0.0 else -math.inf


# Fusion is said aloud: Triton's default is in flux.
@launched(num_warps=WARPS, enable_fp_fusion=True)
def _adam(
    cells_ptr,
    owners_ptr,
    scale_ptr,
    found_ptr,
    lr_ptr,
    tensors,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    log1,
    log2,
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
    CHUNK: tl.constexpr,
):
    if CHECKED:
        # Flags from elsewhere may be sums.
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
    steps = tl.load(step.to(tl.pointer_type(tl.float32))) + 1.0
    step_size = lr / one_minus_exp(steps * log1)
    widen = tl.rsqrt(one_minus_exp(steps * log2))
    if (param | grad | avg | square | largest | master) % 16 == 0 and left >= CHUNK:
        _chunk(param, grad, avg, square, largest, master, start, left, scale, lr,
               step_size, widen, beta1, rest1, beta2, rest2, eps, weight_decay, PARAM,
               GRAD, SCALED, DECAY, DECOUPLED, MAXIMIZE, MASTERS, AMSGRAD, WRITE_BACK,
               CHUNK, True)  # fmt: skip
    else:
        _chunk(param, grad, avg, square, largest, master, start, left, scale, lr,
               step_size, widen, beta1, rest1, beta2, rest2, eps, weight_decay, PARAM,
               GRAD, SCALED, DECAY, DECOUPLED, MAXIMIZE, MASTERS, AMSGRAD, WRITE_BACK,
               CHUNK, False)  # fmt: skip


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
    widen,
    beta1,
    rest1,
    beta2,
    rest2,
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
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    places = tl.arange(0, CHUNK)
    inside = within(places, left, CHUNK, WHOLE)
    param_ptr = pointer(param, start, PARAM, WHOLE) + places
    grad_ptr = pointer(grad, start, GRAD, WHOLE) + places
    avg_ptr = pointer(avg, start, tl.float32, WHOLE) + places
    square_ptr = pointer(square, start, tl.float32, WHOLE) + places
    g = unscaled(tl.load(grad_ptr, mask=inside, other=0.0), scale, SCALED, MAXIMIZE)
    if WRITE_BACK:
        tl.store(grad_ptr, (-g if MAXIMIZE else g).to(GRAD), mask=inside)
    if MASTERS:
        master_ptr = pointer(master, start, tl.float32, WHOLE) + places
        p = tl.load(master_ptr, mask=inside, other=0.0)
    else:
        p = tl.load(param_ptr, mask=inside, other=0.0)
    m = tl.load(avg_ptr, mask=inside, other=0.0)
    v = tl.load(square_ptr, mask=inside, other=0.0)
    if DECAY:
        if DECOUPLED:
            p -= lr * weight_decay * p
        else:
            g += weight_decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    tl.store(avg_ptr, m, mask=inside)
    tl.store(square_ptr, v, mask=inside)
    if AMSGRAD:
        largest_ptr = pointer(largest, start, tl.float32, WHOLE) + places
        v = tl.maximum(v, tl.load(largest_ptr, mask=inside, other=0.0))
        tl.store(largest_ptr, v, mask=inside)
    p -= step_size * m / (tl.sqrt_rn(v) * widen + eps)
    if MASTERS:
        tl.store(master_ptr, p, mask=inside)
    tl.store(param_ptr, p.to(PARAM), mask=inside)
