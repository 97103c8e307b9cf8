"""Clipping by norm: what is asked for, and the coefficient that gives it."""

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import ConfigError

# The smallest normal f32: below, the multiplier loses digits and ends at 0.
SMALLEST_MULTIPLIER = 2.0**-126


class Clip(NamedTuple):
    """One clip, as it goes into the step.

    Attributes:
        norm: f32[], the norm of the unscaled gradients.
        coef: f32[], in [0, 1]: what the gradients are multiplied by.
        found: f32[], 1 if the norm or the multiplier is not a usable f32, else 0.
    """

    norm: Tensor
    coef: Tensor
    found: Tensor


def clip_of(norm: Tensor, max_norm: float, factor: Tensor) -> Clip:
    """Return the clip for gradients of this norm. No host sync.

    Args:
        norm: f32[] or f64[], the norm of the unscaled gradients.
        max_norm: The largest norm to let through.
        factor: f32[], what the gradients are multiplied by beside the clip.
    """
    norm = norm.float()
    # The same small number as torch.nn.utils.clip_grad_norm_.
    coef = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    usable = torch.isfinite(norm)
    if max_norm > 0.0:
        usable = usable & (coef * factor >= SMALLEST_MULTIPLIER)
    return Clip(norm=norm, coef=coef, found=1.0 - usable.float())


def check_max_norm(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Return both as floats, or refuse them."""
    for name, value, low in (("max_norm", max_norm, 0.0), ("norm_type", norm_type, 1.0)):
        number = float(value) if isinstance(value, Real) else math.nan
        if isinstance(value, bool) or not number >= low:
            raise ConfigError(
                f"{name}={value!r} cannot be used to clip gradients. It must be a "
                f"number from {low:g} up, inf included. Pass max_norm=1.0 and leave "
                "norm_type at 2.0 if in doubt.",
                code="GS101",
            )
    return float(max_norm), float(norm_type)


def split_target(target: Any) -> tuple[list[Any], list[Tensor]]:
    """Return (optimizers, parameters) that `target` stands for."""
    if isinstance(target, Tensor):
        return [], [target]
    if getattr(target, "param_groups", None) is not None:
        return [target], []
    items = list(target) if isinstance(target, Iterable) else [target]
    optimizers = [x for x in items if getattr(x, "param_groups", None) is not None]
    params = [x for x in items if isinstance(x, Tensor)]
    if not items or len(optimizers) + len(params) != len(items) or (
        optimizers and params
    ):
        kinds = sorted({type(x).__name__ for x in items}) or ["nothing"]
        raise ConfigError(
            f"clip_grad_norm_() was given {', '.join(kinds)}. It clips the gradients "
            "of optimizers or of parameters. Pass an optimizer, a list of optimizers, "
            "or model.parameters().",
            code="GS101",
        )
    return optimizers, params
