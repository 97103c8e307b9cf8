"""What the tests train: parameters, planted gradients, optimizers of every kind."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import GradScaler
from gradscale.torch.step.dispatch import unscales_itself

Grad = float | Sequence[float] | Tensor

# How far from the exact result a value may lie where the arithmetic cannot be exact.
TOLERANCE = {
    # 8 bits of mantissa, one rounding: 2**-8.
    torch.bfloat16: 2.0**-8,
    # 11 bits of mantissa, one rounding: 2**-11.
    torch.float16: 2.0**-11,
    # 24 bits; a norm, its inverse and two products: five roundings of 2**-24.
    torch.float32: 5 * 2.0**-24,
    # A norm of f64 gradients leaves the scaler as f32.
    torch.float64: 5 * 2.0**-24,
}


class _Planted(torch.autograd.Function):
    """A loss of 0 with the gradient that a test asks for."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return torch.zeros((), device=param.device)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        # Wide: the product is rounded once, to the dtype of the gradient.
        wide = torch.promote_types(grad.dtype, torch.float64)
        return (grad.to(wide) * upstream.double()).to(grad.dtype), None


def parameter(
    *shape: int, value: float = 0.0, dtype: torch.dtype = torch.float32
) -> torch.nn.Parameter:
    """Return a parameter of this shape, all elements equal."""
    return torch.nn.Parameter(torch.full(shape, value, dtype=dtype))


def planted(param: Tensor, grad: Grad) -> Tensor:
    """Return a loss of 0 whose gradient with respect to `param` is `grad`.

    The loss is finite even where the gradient is not, as after an overflow in the
    middle of a backward pass.
    """
    wanted = torch.as_tensor(grad, dtype=param.dtype, device=param.device)
    wanted = wanted.expand_as(param)
    return _Planted.apply(param, wanted)


def backward(scaler: Any, param: Tensor, grad: Grad) -> None:
    """Add `grad` times the scale to the gradient of `param`."""
    scaler.scale(planted(param, grad)).backward()


def iterate(scaler: Any, optimizer: Any, param: Tensor, grad: Grad) -> None:
    """Run one whole iteration."""
    optimizer.zero_grad()
    backward(scaler, param, grad)
    scaler.step(optimizer)
    scaler.update()


def sparse(places: Sequence[int], values: Any, size: int, **how: Any) -> Tensor:
    """Return a sparse gradient; places may repeat."""
    values = torch.as_tensor(values, **how)
    shape = (size, *values.shape[1:])
    # Said explicitly: torch warns where the check is left to chance.
    return torch.sparse_coo_tensor([list(places)], values, shape, check_invariants=True)


class Custom(torch.optim.Optimizer):
    """An optimizer that knows nothing of scalers: plain descent."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        returned = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
        return returned


class CustomFused(torch.optim.Optimizer):
    """An optimizer that takes `grad_scale` and `found_inf`, and writes down both."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[tuple[float | None, float]] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        grad_scale, found_inf = self.grad_scale, self.found_inf
        divisor = None if grad_scale is None else float(grad_scale)
        self.seen.append((divisor, float(found_inf)))
        if found_inf:
            return
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if divisor is not None:
                        param.grad.div_(divisor)
                    param.add_(param.grad, alpha=-group["lr"])


class OlderProtocol(torch.optim.Optimizer):
    """An optimizer that takes the scaler itself, the protocol of old."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.scalers: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> str:
        self.scalers.append(grad_scaler)
        found = grad_scaler._check_inf_per_device(self)
        if not any(flag.item() for flag in found.values()):
            scale = grad_scaler._get_scale_async()
            for param in self.param_groups[0]["params"]:
                param.add_(param.grad / scale, alpha=-self.param_groups[0]["lr"])
        return "stepped"


def _of_torch(kind: type[torch.optim.Optimizer], **how: bool) -> Callable[..., Any]:
    def make(params: Any, **settings: Any) -> torch.optim.Optimizer:
        return kind(params, **how, **settings)

    return make


_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
PLAIN = {
    f"{kind.__name__}-{name}": _of_torch(kind, **how)
    for kind in _KINDS
    for name, how in (("loop", {"foreach": False}), ("foreach", {"foreach": True}))
} | {"Custom": Custom}
# Torch 2.11 has a fused Adagrad that knows nothing of scalers.
_AWARE = [
    kind
    for kind in _KINDS
    if unscales_itself(kind([torch.zeros(1, requires_grad=True)], fused=True))
]
FUSED = {f"{kind.__name__}-fused": _of_torch(kind, fused=True) for kind in _AWARE} | {
    "CustomFused": CustomFused
}
OPTIMIZERS = PLAIN | FUSED

INF, NAN = math.inf, math.nan


def two_optimizers(
    grads: Sequence[tuple[Grad | None, Grad | None]], **how: Any
) -> tuple[GradScaler, Any, Any]:
    """Run iterations of a plain and a fused optimizer; None is no gradient."""
    scaler, a, b = GradScaler("cpu", **how), parameter(2), parameter(2)
    first, second = torch.optim.SGD([a], lr=1.0), torch.optim.AdamW([b], fused=True)
    for pair in grads:
        first.zero_grad()
        second.zero_grad()
        for param, grad in zip((a, b), pair, strict=True):
            if grad is not None:
                backward(scaler, param, grad)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*GS103")
            scaler.step(first)
            scaler.step(second)
        scaler.update()
    return scaler, first, second


def scaled_once(kind: Any, **how: Any) -> tuple[Any, torch.optim.SGD, Tensor]:
    """Return a scaler, an optimizer and its parameter after one backward."""
    scaler, param = kind("cpu", **how), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    return scaler, optimizer, param
