"""The two scalers from before amp, on the rule of gradscale's policies."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradscale.core.policies import DynamicScale, StaticScale
from gradscale.core.state import PYTHON, Observed, ScaleState


class LossScaler:
    """A fixed scale.

    Args:
        scale: The scale.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    @property
    def policy(self) -> DynamicScale | StaticScale:
        """Settings and rule."""
        return StaticScale(scale=float(self.cur_scale))

    def state(self) -> dict[str, Any]:
        """Return the state and the settings."""
        return dict(vars(self))

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient is not finite. Apex returns False here. Syncs."""
        return has_overflow(params)

    def update_scale(self, overflow: bool) -> None:
        """Do nothing."""

    def scale_gradient(
        self, module: Any, grad_in: tuple[Tensor | None, ...], grad_out: Any
    ) -> tuple[Tensor | None, ...]:
        """Multiply the gradients of a backward hook by the scale."""
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that grows after a quiet window and is divided on overflow.

    >>> scaler = DynamicLossScaler(init_scale=8.0, scale_window=2)
    >>> for overflow in (False, False, True):
    ...     scaler.update_scale(overflow)
    ...     print(scaler.loss_scale)
    8.0
    16.0
    8.0

    Args:
        init_scale: The first scale.
        scale_factor: The factor of growth and of backing off.
        scale_window: The steps without overflow after which it grows.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
    ) -> None:
        super().__init__(init_scale)
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.cur_iter = 0
        self.last_overflow_iter = -1

    @property
    def policy(self) -> DynamicScale:
        """Settings and rule."""
        return DynamicScale.unchecked(
            growth_factor=self.scale_factor,
            backoff_factor=1.0 / self.scale_factor,
            growth_interval=self.scale_window,
            min_scale=1.0,
        )

    def update_scale(self, overflow: bool) -> None:
        """Move the scale after one step."""
        # Apex counts iterations modulo the window; this equals the rule's finite steps.
        steps = (self.cur_iter - self.last_overflow_iter - 1) % self.scale_window
        state = ScaleState(float(self.cur_scale), steps)
        seen = Observed(not overflow, 0.0, True)
        moved = self.policy.next_state(state, seen, PYTHON.where)
        self.cur_scale = float(moved.scale)
        if overflow:
            self.last_overflow_iter = self.cur_iter
        self.cur_iter += 1


def has_overflow(params: Iterable[Tensor]) -> bool:
    """Return whether a gradient is not finite. Syncs once."""
    flags = [
        torch.isfinite(param.grad).all() for param in params if param.grad is not None
    ]
    if not flags:
        return False
    home = flags[0].device
    return not bool(torch.stack([flag.to(home) for flag in flags]).all())
