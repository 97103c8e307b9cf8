"""One pass of SGD or Lion over many tensors: unscale, update, or skip.

The results are those of `plain.sgd_` and `plain.lion_`. Each tensor is read once and
written once; gradients are written only with `write_back`. If `found_inf` is set,
nothing else is read or written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.args import CHUNK, AmpArgs, LionConfig, SgdConfig
from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.pointers import (
    address,
    locate,
    mask,
    pointer,
    unscaled,
)
from gradscale.torch.kernels.read import TRITON_DTYPES

# As for Adam, whose pass moves more bytes for each element.
WARPS = 4


def launch_(
    table: Table,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    config: SgdConfig | LionConfig,
    amp: AmpArgs,
    *,
    masters: bool,
    momenta: bool,
    steps: bool,
) -> None:
    """Launch the pass. No host sync.

    Args:
        table: Rows: parameters, gradients, then momenta, masters and steps, each where
            there are any.
        param_dtype, grad_dtype: f32, f16 or bf16.
        config, amp: As in `plain.sgd_` and `plain.lion_`.
        masters, momenta, steps: Whether there are such rows.
    """
    lr, scale, found = config.lr, amp.grad_scale, amp.found_inf
    lion = nesterov = False
    if isinstance(config, LionConfig):
        lion, beta1, one_minus_beta1 = True, config.beta1, 1.0 - config.beta1
        beta, grad_weight = config.beta2, 1.0 - config.beta2
    else:
        nesterov, beta1, one_minus_beta1 = config.nesterov, 0.0, 0.0
        beta, grad_weight = config.momentum, 1.0 - config.dampening
    # Passed where an argument is not used.
    unused = table.cells
    _momentum(
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
            float(beta),
            float(grad_weight),
            float(beta1),
            float(one_minus_beta1),
            float(config.weight_decay),
        ),
        PARAM=TRITON_DTYPES[param_dtype],
        GRAD=TRITON_DTYPES[grad_dtype],
        LR_TENSOR=isinstance(lr, Tensor),
        SCALED=scale is not None,
        CHECKED=found is not None,
        DECAY=config.weight_decay != 0.0,
        LION=lion,
        NESTEROV=nesterov,
        MAXIMIZE=config.maximize,
        MASTERS=masters,
        MOMENTA=momenta,
        STEPS=steps,
        WRITE_BACK=amp.write_back and scale is not None,
        CHUNK=CHUNK,
    )


# Set explicitly: Triton's default for FP fusion changes between versions.
@launched(num_warps=WARPS, enable_fp_fusion=True)
def _momentum(
    cells_ptr,
    owners_ptr,
    scale_ptr,
    found_ptr,
    lr_ptr,
    tensors,
    lr,
    beta,
    grad_weight,
    beta1,
    one_minus_beta1,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    LR_TENSOR: tl.constexpr,
    SCALED: tl.constexpr,
    CHECKED: tl.constexpr,
    DECAY: tl.constexpr,
    LION: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASTERS: tl.constexpr,
    MOMENTA: tl.constexpr,
    STEPS: tl.constexpr,
    WRITE_BACK: tl.constexpr,
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
    momentum = param
    master = param
    if MOMENTA:
        momentum = address(cells_ptr, tensors, owner, 4)
    if MASTERS:
        master = address(cells_ptr, tensors, owner, 4 + MOMENTA)
    if STEPS:
        step = address(cells_ptr, tensors, owner, 4 + MOMENTA + MASTERS)
        taken = tl.load(step.to(tl.pointer_type(tl.float32)))
        # The first step taken is not dampened.
        grad_weight = tl.where(taken == 0.0, 1.0, grad_weight)
    if (param | grad | momentum | master) % 16 == 0 and left >= CHUNK:
        _chunk(param, grad, momentum, master, start, left, scale, lr, beta, grad_weight,
               beta1, one_minus_beta1, weight_decay, PARAM, GRAD, SCALED, DECAY, LION,
               NESTEROV, MAXIMIZE, MASTERS, MOMENTA, WRITE_BACK, CHUNK,
               True)  # fmt: skip
    else:
        _chunk(param, grad, momentum, master, start, left, scale, lr, beta, grad_weight,
               beta1, one_minus_beta1, weight_decay, PARAM, GRAD, SCALED, DECAY, LION,
               NESTEROV, MAXIMIZE, MASTERS, MOMENTA, WRITE_BACK, CHUNK,
               False)  # fmt: skip


@triton.jit
def _chunk(
    param,
    grad,
    momentum,
    master,
    start,
    left,
    scale,
    lr,
    beta,
    grad_weight,
    beta1,
    one_minus_beta1,
    weight_decay,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    SCALED: tl.constexpr,
    DECAY: tl.constexpr,
    LION: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASTERS: tl.constexpr,
    MOMENTA: tl.constexpr,
    WRITE_BACK: tl.constexpr,
    CHUNK: tl.constexpr,
    FULL: tl.constexpr,
):
    places = tl.arange(0, CHUNK)
    inside = mask(places, left, CHUNK, FULL)
    param_ptr = pointer(param, start, PARAM, FULL) + places
    grad_ptr = pointer(grad, start, GRAD, FULL) + places
    g = unscaled(tl.load(grad_ptr, mask=inside, other=0.0), scale, SCALED, MAXIMIZE)
    if WRITE_BACK:
        tl.store(grad_ptr, (-g if MAXIMIZE else g).to(GRAD), mask=inside)
    if MASTERS:
        master_ptr = pointer(master, start, tl.float32, FULL) + places
        p = tl.load(master_ptr, mask=inside, other=0.0)
    else:
        p = tl.load(param_ptr, mask=inside, other=0.0)
    if MOMENTA:
        momentum_ptr = pointer(momentum, start, tl.float32, FULL) + places
        m = tl.load(momentum_ptr, mask=inside, other=0.0)
    if LION:
        ahead = beta1 * m + one_minus_beta1 * g
        direction = tl.where(ahead > 0.0, 1.0, tl.where(ahead < 0.0, -1.0, 0.0))
        if DECAY:
            p -= lr * weight_decay * p
        m = beta * m + grad_weight * g
        tl.store(momentum_ptr, m, mask=inside)
    else:
        if DECAY:
            g += weight_decay * p
        direction = g
        if MOMENTA:
            m = beta * m + grad_weight * g
            tl.store(momentum_ptr, m, mask=inside)
            if NESTEROV:
                direction = g + beta * m
            else:
                direction = m
    p -= lr * direction
    if MASTERS:
        tl.store(master_ptr, p, mask=inside)
    tl.store(param_ptr, p.to(PARAM), mask=inside)
