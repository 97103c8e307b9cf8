"""What the tests of the optimizers step on: parameters, gradients, settings."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.optim import SGD, Adam, AdamW, Lion

STEPS = 1000
SHAPES = ((7,), (3, 5), ())

# How far from torch's result a parameter of magnitude 1 may lie after STEPS steps.
TOLERANCE: dict[object, float] = {
    # Each step rounds the parameter once in both, by 2**-25 at most below 1 and 2**-24
    # below 2; the moments' few roundings are scaled down by lr.
    torch.float32: STEPS * 2.0**-23,
    # The same with 29 bits more.
    torch.float64: STEPS * 2.0**-52,
    # Of the size of one update in f32: its dozen roundings of 2**-24 each.
    "update": 12 * 2.0**-24,
}

ADAM_SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "weight_decay": {"weight_decay": 0.1},
    "betas": {"betas": (0.5, 0.75)},
    "no_first_moment": {"betas": (0.0, 0.99)},
    "eps": {"eps": 0.5},
    "all": {"amsgrad": True, "maximize": True, "weight_decay": 0.1, "eps": 1e-4},
}
SGD_SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "momentum": {"momentum": 0.75},
    "dampening": {"momentum": 0.75, "dampening": 0.5},
    "nesterov": {"momentum": 0.75, "nesterov": True},
    "weight_decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "all": {
        "momentum": 0.75,
        "dampening": 0.25,
        "weight_decay": 0.1,
        "maximize": True,
    },
}
NAMESAKES = {AdamW: torch.optim.AdamW, Adam: torch.optim.Adam, SGD: torch.optim.SGD}
_NAMED = [
    *((kind, name) for kind in (AdamW, Adam) for name in ADAM_SETTINGS),
    *((SGD, name) for name in SGD_SETTINGS),
]
CASES = [
    (kind, (SGD_SETTINGS if kind is SGD else ADAM_SETTINGS)[name])
    for kind, name in _NAMED
]
CASE_IDS = [f"{kind.__name__}-{name}" for kind, name in _NAMED]
# One of each kind, with state to lose.
KINDS = {
    "AdamW": (AdamW, {"lr": 0.01}),
    "Adam": (Adam, {"lr": 0.01, "amsgrad": True}),
    "SGD": (SGD, {"lr": 0.01, "momentum": 0.75, "dampening": 0.25}),
    "Lion": (Lion, {"lr": 0.01, "weight_decay": 0.1}),
}


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[torch.nn.Parameter]:
    """Return parameters, the same in every call but for rounding."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.rand(shape, generator=generator) * 2 - 1 for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


@cache
def _recorded(steps: int, shapes: tuple[tuple[int, ...], ...]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    recorded = []
    for _ in range(steps):
        size = 10.0 ** (torch.rand((), generator=generator) * 4 - 3)
        noise = [torch.randn(shape, generator=generator) for shape in shapes]
        recorded.append([size * grad for grad in noise])
    return recorded


def stream(
    steps: int,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> Iterator[list[Tensor]]:
    """Return the gradients of many steps, of all magnitudes, rounded to `dtype`.

    They are the same in every call. Nobody writes into them: they are copied.
    """
    for grads in _recorded(steps, tuple(shapes)):
        yield [grad.to(dtype, copy=True) for grad in grads]


def give(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Set the gradients, in the dtype of the parameters."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)


def train(optimizer: Any, steps: int = 5, dtype: torch.dtype = torch.float32) -> None:
    """Take some steps on the stream, all parameters in order."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for grads in stream(steps, [tuple(p.shape) for p in params], dtype):
        give(params, grads)
        optimizer.step()


def step_with(
    optimizer: Any, *, grad_scale: float | None = None, found_inf: float = 0.0
) -> None:
    """Take one step as a scaler would have it taken."""
    if grad_scale is not None:
        optimizer.grad_scale = torch.tensor(grad_scale)
    optimizer.found_inf = torch.tensor(found_inf)
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf
        if grad_scale is not None:
            del optimizer.grad_scale


def everything(optimizer: Any) -> list[Tensor]:
    """Return copies of all parameters and of all state."""
    kept = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            entries = optimizer.state.get(param, {}).values()
            kept += [param.detach().clone(), *(entry.clone() for entry in entries)]
    return kept


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether all bits, dtypes and shapes are equal."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        for a, b in zip(first, second, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8)
