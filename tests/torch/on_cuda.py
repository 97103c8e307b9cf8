"""What the tests of the kernels on CUDA share: models, optimizers, a busy device."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradscale.torch import GradScaler, optim

OWN = {
    "AdamW": lambda p, **how: optim.AdamW(p, lr=0.01, **how),
    "amsgrad": lambda p, **how: optim.Adam(p, lr=0.01, amsgrad=True, **how),
    "SGD": lambda p, **how: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, **how),
    "dampened": lambda p, **how: optim.SGD(
        p, lr=0.01, momentum=0.9, dampening=0.5, **how
    ),
    "Lion": lambda p, **how: optim.Lion(p, lr=0.001, weight_decay=0.1, **how),
}
BAD_STEPS = (3, 4, 9)


def fused(params: Any, **how: Any) -> torch.optim.Optimizer:
    """Return torch's own fused AdamW."""
    return torch.optim.AdamW(params, lr=0.01, fused=True, **how)


def small_model(layers: int = 1) -> torch.nn.Module:
    """Return a model on the device, the same in every call.

    Args:
        layers: Before the last one; 4 tensors in all with one, 2 more with each other.
    """
    torch.manual_seed(0)
    widths = [16, *[70] * layers]
    hidden = [
        module
        for inputs, outputs in pairwise(widths)
        for module in (torch.nn.Linear(inputs, outputs), torch.nn.GELU())
    ]
    return torch.nn.Sequential(*hidden, torch.nn.Linear(70, 1)).cuda()


def batch(step: int) -> Tensor:
    """Return the data of a step; some steps have an infinity in it."""
    torch.manual_seed(100 + step)
    x = torch.randn(8, 16, device="cuda")
    if step in BAD_STEPS:
        x[0, 0] = math.inf
    return x


def take_step(
    scaler: GradScaler,
    model: torch.nn.Module,
    optimizer: Any,
    x: Tensor,
    *,
    max_norm: float | None = 0.05,
    set_to_none: bool = True,
) -> None:
    """Run one whole step, from the loss to the update."""
    optimizer.zero_grad(set_to_none=set_to_none)
    scaler.scale(model(x).square().mean()).backward()
    if max_norm is not None:
        scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)
    scaler.update()


@cache
def _cycles_per_ms() -> float:
    """Return how long the device counts for a millisecond."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / begin.elapsed_time(end)


def keep_busy(milliseconds: float) -> None:
    """Queue work that takes this long and touches nothing."""
    torch.cuda._sleep(int(milliseconds * _cycles_per_ms()))


def is_busy() -> bool:
    """Return whether the device still has work to do."""
    return not torch.cuda.current_stream().query()


@contextmanager
def no_sync() -> Iterator[None]:
    """Turn every synchronising call of torch into an error."""
    torch.cuda.synchronize()
    _sync_debug_mode("error")
    try:
        yield
    finally:
        _sync_debug_mode("default")


def _sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        # Torch says each time that the mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
