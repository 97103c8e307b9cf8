"""What PyTorch's fused Adam and AdamW compute on CUDA, bit for bit, in one launch.

All is f32, each operation is rounded, and what torch makes one fused multiply-add is
one here. Where the flag says skip, all is left as it was. The count of each step is
made before, by torch; if it is to be taken back, that is done afterwards.

Its reference is torch's own kernel, which it is compared with on each device.

One operation has no twin here: CUDA's `powf` is not the same in all its versions. So
torch itself raises the betas to the count of the first tensor, which nearly always is
that of all; for others they are raised in f64, which is nearer to the truth.
"""

import triton
import triton.language as tl
from torch import Tensor

from gradscale.torch.kernels.args import CHUNK, AdamConfig
from gradscale.torch.kernels.launch import launched
from gradscale.torch.kernels.pointer_table import Table
from gradscale.torch.kernels.pointers import address, locate, pointer, within

WARPS = 4


def adam_(
    table: Table,
    config: AdamConfig,
    powers: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor,
    *,
    amsgrad: bool,
) -> None:
    """Launch the pass; the divided gradients are written. No host sync.

    Args:
        table: Of f32 tensors. Rows: parameters, gradients, exp_avg, exp_avg_sq, then
            max_exp_avg_sq where there is any, then steps.
        config: The settings.
        powers: f32[2], beta1 and beta2 to the count of the first tensor.
        grad_scale: f32[], what the gradients are divided by; None to leave them.
        found_inf: f32[], 1 to skip the step, else 0.
        amsgrad: Whether there is such a row.
    """
    lr = config.lr
    # An argument that is not looked at.
    unused = table.cells
    _adam(
        table.chunks,
        (
            table.cells,
            table.owners,
            powers,
            unused if grad_scale is None else grad_scale,
            found_inf,
            lr if isinstance(lr, Tensor) else unused,
        ),
        (
            table.tensors,
            0.0 if isinstance(lr, Tensor) else float(lr),
            float(config.beta1),
            float(config.beta2),
            float(config.eps),
            float(config.weight_decay),
        ),
        LR_TENSOR=isinstance(lr, Tensor),
        SCALED=grad_scale is not None,
        DECAY=config.weight_decay != 0.0,
        DECOUPLED=config.decoupled,
        MAXIMIZE=config.maximize,
        AMSGRAD=amsgrad,
        CHUNK=CHUNK,
    )


@triton.jit
def _power(base, exponent):
    return tl.exp(tl.log(tl.full((), base, tl.float64)) * exponent).to(tl.float32)


# No fusion but where it is written.
@launched(num_warps=WARPS, enable_fp_fusion=False)
def _adam(
    cells_ptr,
    owners_ptr,
    powers_ptr,
    scale_ptr,
    found_ptr,
    lr_ptr,
    tensors,
    lr,
    beta1,
    beta2,
    eps,
    decay,
    LR_TENSOR: tl.constexpr,
    SCALED: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    if tl.load(found_ptr) != 0.0:
        return
    owner, start, left = locate(cells_ptr, owners_ptr, tensors, CHUNK)
    step = address(cells_ptr, tensors, owner, 6 + AMSGRAD)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr)
    if LR_TENSOR:
        lr = tl.load(lr_ptr)
    param = address(cells_ptr, tensors, owner, 2)
    grad = address(cells_ptr, tensors, owner, 3)
    avg = address(cells_ptr, tensors, owner, 4)
    square = address(cells_ptr, tensors, owner, 5)
    largest = square
    if AMSGRAD:
        largest = address(cells_ptr, tensors, owner, 6)
    steps = tl.load(step.to(tl.pointer_type(tl.float32)))
    first = address(cells_ptr, tensors, 0, 6 + AMSGRAD)
    power1, power2 = tl.load(powers_ptr), tl.load(powers_ptr + 1)
    if steps != tl.load(first.to(tl.pointer_type(tl.float32))):
        power1, power2 = _power(beta1, steps), _power(beta2, steps)
    step_size = tl.div_rn(lr, 1.0 - power1)
    root = tl.sqrt_rn(1.0 - power2)
    if (param | grad | avg | square | largest) % 16 == 0 and left >= CHUNK:
        _chunk(param, grad, avg, square, largest, start, left, scale, lr, step_size,
               root, beta1, beta2, eps, decay, SCALED, DECAY, DECOUPLED, MAXIMIZE,
               AMSGRAD, CHUNK, True)  # fmt: skip
    else:
        _chunk(param, grad, avg, square, largest, start, left, scale, lr, step_size,
               root, beta1, beta2, eps, decay, SCALED, DECAY, DECOUPLED, MAXIMIZE,
               AMSGRAD, CHUNK, False)  # fmt: skip


@triton.jit
def _chunk(
    param,
    grad,
    avg,
    square,
    largest,
    start,
    left,
    scale,
    lr,
    step_size,
    root,
    beta1,
    beta2,
    eps,
    decay,
    SCALED: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    places = tl.arange(0, CHUNK)
    inside = within(places, left, CHUNK, WHOLE)
    param_ptr = pointer(param, start, tl.float32, WHOLE) + places
    grad_ptr = pointer(grad, start, tl.float32, WHOLE) + places
    avg_ptr = pointer(avg, start, tl.float32, WHOLE) + places
    square_ptr = pointer(square, start, tl.float32, WHOLE) + places
    g = tl.load(grad_ptr, mask=inside, other=0.0)
    p = tl.load(param_ptr, mask=inside, other=0.0)
    m = tl.load(avg_ptr, mask=inside, other=0.0)
    v = tl.load(square_ptr, mask=inside, other=0.0)
    if SCALED:
        g = tl.div_rn(g, scale)
        tl.store(grad_ptr, g, mask=inside)
    if MAXIMIZE:
        g = -g
    if DECAY:
        if DECOUPLED:
            p = tl.fma(-(lr * decay), p, p)
        else:
            g = tl.fma(p, decay, g)
    m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
    v = tl.fma(beta2, v, tl.fma(-beta2, g * g, g * g))
    tl.store(avg_ptr, m, mask=inside)
    tl.store(square_ptr, v, mask=inside)
    if AMSGRAD:
        largest_ptr = pointer(largest, start, tl.float32, WHOLE) + places
        before = tl.load(largest_ptr, mask=inside, other=0.0)
        # As C++ compares: what is not a number stays where it is.
        v = tl.where(before < v, v, before)
        tl.store(largest_ptr, v, mask=inside)
    p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(param_ptr, p, mask=inside)
