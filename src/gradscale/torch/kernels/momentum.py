"""One pass of SGD or Lion over many tensors: unscale, clip, update.

Computes what `reference.sgd_` and `reference.lion_` do. Each tensor is read once and
written once; the gradient is not written unless that is asked for. Where the flag says
skip, nothing is read or written.
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
        config, amp: As in `reference.sgd_` and `reference.lion_`.
        masters, momenta, steps: Whether there are such rows.
    """
    lr, scale, found = config.lr, amp.grad_scale, amp.found_inf
    lion = nesterov = False
    if isinstance(config, LionConfig):
        lion, stay, turn = True, config.beta1, 1.0 - config.beta1
        keep, take = config.beta2, 1.0 - config.beta2
    else:
        nesterov, stay, turn = config.nesterov, 0.0, 0.0
        keep, take = config.momentum, 1.0 - config.dampening
    # An argument that is not looked at.
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
            float(keep),
            float(take),
            float(stay),
            float(turn),
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


# Fusion is said aloud: Triton's default is in flux.
@launched(num_warps=WARPS, enable_fp_fusion=True)
def _momentum(
    cells_ptr,
    owners_ptr,
    scale_ptr,
    found_ptr,
    lr_ptr,
    tensors,
    lr,
    keep,
    take,
    stay,
    turn,
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
    momentum = param
    master = param
    if MOMENTA:
        momentum = address(cells_ptr, tensors, owner, 4)
    if MASTERS:
        master = address(cells_ptr, tensors, owner, 4 + MOMENTA)
    if STEPS:
        step = address(cells_ptr, tensors, owner, 4 + MOMENTA + MASTERS)
        taken = tl.load(step.to(tl.pointer_type(tl.float32)))
        # The first step that is taken has nothing to dampen.
        take = tl.where(taken == 0.0, 1.0, take)
    if (param | grad | momentum | master) % 16 == 0 and left >= CHUNK:
        _chunk(param, grad, momentum, master, start, left, scale, lr, keep, take, stay,
               turn, weight_decay, PARAM, GRAD, SCALED, DECAY, LION, NESTEROV, MAXIMIZE,
               MASTERS, MOMENTA, WRITE_BACK, CHUNK, True)  # fmt: skip
    else:
        _chunk(param, grad, momentum, master, start, left, scale, lr, keep, take, stay,
               turn, weight_decay, PARAM, GRAD, SCALED, DECAY, LION, NESTEROV, MAXIMIZE,
               MASTERS, MOMENTA, WRITE_BACK, CHUNK, False)  # fmt: skip


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
    keep,
    take,
    stay,
    turn,
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
    WHOLE: tl.constexpr,
):
    places = tl.arange(0, CHUNK)
    inside = within(places, left, CHUNK, WHOLE)
    param_ptr = pointer(param, start, PARAM, WHOLE) + places
    grad_ptr = pointer(grad, start, GRAD, WHOLE) + places
    g = unscaled(tl.load(grad_ptr, mask=inside, other=0.0), scale, SCALED, MAXIMIZE)
    if WRITE_BACK:
        tl.store(grad_ptr, (-g if MAXIMIZE else g).to(GRAD), mask=inside)
    if MASTERS:
        master_ptr = pointer(master, start, tl.float32, WHOLE) + places
        p = tl.load(master_ptr, mask=inside, other=0.0)
    else:
        p = tl.load(param_ptr, mask=inside, other=0.0)
    if MOMENTA:
        momentum_ptr = pointer(momentum, start, tl.float32, WHOLE) + places
        m = tl.load(momentum_ptr, mask=inside, other=0.0)
    if LION:
        ahead = stay * m + turn * g
        direction = tl.where(ahead > 0.0, 1.0, tl.where(ahead < 0.0, -1.0, 0.0))
        if DECAY:
            p -= lr * weight_decay * p
        m = keep * m + take * g
        tl.store(momentum_ptr, m, mask=inside)
    else:
        if DECAY:
            g += weight_decay * p
        direction = g
        if MOMENTA:
            m = keep * m + take * g
            tl.store(momentum_ptr, m, mask=inside)
            if NESTEROV:
                direction = g + keep * m
            else:
                direction = m
    p -= lr * direction
    if MASTERS:
        tl.store(master_ptr, p, mask=inside)
    tl.store(param_ptr, p.to(PARAM), mask=inside)
