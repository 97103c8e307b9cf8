"""Clips by norm: checks the arguments, folds the clip into a step or applies it.

The coefficient itself is computed by `kernels.plain.clip_to` and by `kernels.decide`.
"""

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradscale.errors import ConfigError
from gradscale.torch.grads.stats import combine_norms, read
from gradscale.torch.grads.unscale import multiply_
from gradscale.torch.kernels.plain import clip_to
from gradscale.torch.tensor_list import GradSnapshot


class Clip(NamedTuple):
    """One clip, as it is folded into the step.

    Attributes:
        norm: f32[], the norm of the unscaled gradients.
        coef: f32[], in [0, 1]: the factor still to apply; 1 once applied.
        norm_unusable: f32[], 1 if the norm or the multiplier is not a usable f32, else
            0.
    """

    norm: Tensor
    coef: Tensor
    norm_unusable: Tensor

    def after(self, earlier: "Clip") -> "Clip":
        """Return this clip combined with an earlier one."""
        return Clip(
            norm=self.norm,
            coef=self.coef * earlier.coef,
            norm_unusable=torch.maximum(self.norm_unusable, earlier.norm_unusable),
        )

    def applied(self) -> "Clip":
        """Return the clip after the gradients were multiplied by it."""
        return Clip(self.norm, torch.ones_like(self.coef), self.norm_unusable)


def clip_of(norm: Tensor, max_norm: float, factor: Tensor) -> Clip:
    """Return the clip for gradients of this norm. No host sync.

    Args:
        norm: f32[] or f64[], the norm of the unscaled gradients.
        max_norm: The maximum norm.
        factor: f32[], the other factor that multiplies the gradients.
    """
    norm = norm.float()
    return Clip(norm, *clip_to(norm, max_norm, factor))


def clip_params_(
    gradients: GradSnapshot,
    unscaled: set[int],
    inv_scale: Tensor,
    max_norm: float,
    norm_type: float,
    agree_on_norm: Callable[[Tensor | None, float], Tensor] | None = None,
) -> Clip:
    """Clip gradients in place, some of them scaled and some not. No host sync.

    Args:
        gradients: At least one tensor, unless there are other ranks.
        unscaled: The ids of the parameters whose gradients are already unscaled.
        inv_scale: f32[], the factor that unscales the others.
        max_norm, norm_type: The maximum norm, and its order.
        agree_on_norm: Returns the norm over all ranks from that of this one; None
            where this rank decides alone.
    """
    norms, factors = [], []
    for factor, wanted in ((inv_scale, False), (torch.ones_like(inv_scale), True)):
        here = [
            place
            for place, param in enumerate(gradients.params)
            if (id(param) in unscaled) is wanted
        ]
        if here:
            part = gradients.only(here)
            norm = read(part, inv_scale.device, norm_type).norm
            assert norm is not None
            norms.append(norm * factor)
            factors.append(factor)
    norm = combine_norms(norms, norm_type) if norms else None
    if agree_on_norm is not None:
        # The same on all ranks, whichever gradients they have.
        norm, factors = agree_on_norm(norm, norm_type), [inv_scale]
    assert norm is not None
    clip = clip_of(norm, max_norm, torch.stack(factors).amin())
    multiply_(gradients.originals or gradients.tensors, clip.coef, gradients.kind)
    return clip.applied()


def check_max_norm(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Return both as floats; raise for invalid ones."""
    limits = (("max_norm", max_norm, 0.0), ("norm_type", norm_type, 1.0))
    for name, value, low in limits:
        number = float(value) if isinstance(value, (float, Real)) else math.nan
        if isinstance(value, bool) or not number >= low:
            raise ConfigError(
                f"{name}={value!r} cannot be used to clip gradients. It must be a "
                f"number from {low:g} up, inf included. Pass max_norm=1.0 and leave "
                "norm_type at 2.0 if in doubt.",
                code="GS101",
            )
    return float(max_norm), float(norm_type)


def split_target(target: Any) -> tuple[list[Any], list[Tensor]]:
    """Split `target` into optimizers and parameters."""
    if isinstance(target, Tensor):
        return [], [target]
    if getattr(target, "param_groups", None) is not None:
        return [target], []
    items = list(target) if isinstance(target, Iterable) else [target]
    optimizers = [x for x in items if getattr(x, "param_groups", None) is not None]
    params = [x for x in items if isinstance(x, Tensor)]
    if max(len(optimizers), len(params)) != len(items):
        kinds = sorted({type(x).__name__ for x in items})
        raise ConfigError(
            f"clip_grad_norm_() was given {', '.join(kinds)}. It clips the gradients "
            "of optimizers or of parameters. Pass an optimizer, a list of optimizers, "
            "or model.parameters().",
            code="GS101",
        )
    return optimizers, params
