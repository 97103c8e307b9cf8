"""Optimizers that evaluate the loss themselves: LBFGS, SAM and the like."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.errors import ConfigError, OrderError
from gradscale.torch.messages import mark_called
from gradscale.torch.precision.master_weights import MasterWeights
from gradscale.torch.scaled_loss import is_scaled
from gradscale.torch.scaler import GradScaler
from gradscale.torch.step.dispatch import StepMode, mode_of

# Stands for a loss that is not finite: line searches interpolate between losses, and
# infinity would make the step NaN.
LARGE_LOSS = 2.0**100


def step_with_closure(
    scaler: GradScaler,
    optimizer: Any,
    closure: Callable[[], Any],
    *,
    retries: int = 16,
) -> Any:
    """Step an optimizer that evaluates the loss by a closure, under the scaler.

    Gradients are unscaled before the optimizer sees them. If they are not finite while
    the loss is, the scale is lowered and the closure runs again. If that does not help
    at the first evaluation, the step is skipped. At a later one, as at a trial point of
    a line search, the optimizer gets a large loss and zero gradients; if it ends there,
    weights and optimizer state are restored, and the step counts as skipped. Then call
    `scaler.update()` as usual.

    Reads one flag and the loss on the host for each evaluation, and copies weights and
    optimizer state before the step.

    >>> import torch
    >>> from gradscale.torch import GradScaler
    >>> weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    >>> optimizer = torch.optim.LBFGS([weight], line_search_fn="strong_wolfe")
    >>> scaler = GradScaler("cpu")
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (weight - 1).square().sum()
    ...     scaler.scale(loss).backward()
    ...     return loss
    >>> first_loss = step_with_closure(scaler, optimizer, closure)
    >>> scaler.update()
    >>> first_loss.item(), weight.detach().round(decimals=4).tolist()
    (13.0, [1.0, 1.0])

    Args:
        scaler: Its `scale` is called by the closure.
        optimizer: Calls the closure once or several times.
        closure: Clears the gradients, computes the loss, runs the backward pass of
            `scaler.scale(loss)`, and returns the loss before scaling.
        retries: How often an evaluation may be repeated at a lower scale.

    Returns:
        The result of `optimizer.step`; None if the step was skipped.
    """
    if not callable(closure):
        raise ConfigError(
            f"closure={closure!r} cannot be called. The optimizer evaluates the loss "
            "by calling it. Pass a function that returns the loss.",
            code="GS101",
        )
    if not scaler.is_enabled():
        return optimizer.step(closure)
    if mode_of(optimizer) is StepMode.OWN and any(
        param.dtype is torch.float16 for param in _params_of(optimizer)
    ):
        raise _unscales_later(type(optimizer).__name__)
    evaluation = _Evaluation(scaler, optimizer, closure, retries)
    backup = _Backup(optimizer)
    loop = scaler._monitor.loop
    stepping, loop.stepping = loop.stepping, True
    try:
        returned = optimizer.step(evaluation)
    except _FirstFailed:
        evaluation.ended_well = False
    finally:
        loop.stepping = stepping
    if not evaluation.ended_well:
        backup.restore()
        mark_called(optimizer)
        returned = None
    if evaluation.runs:
        scaler._iteration.states[id(optimizer)]["stage"] = OptState.STEPPED
    return returned


class _FirstFailed(Exception):
    """The first evaluation gave no usable gradients."""


class _Evaluation:
    """The closure that the optimizer calls: gradients are unscaled and checked.

    Attributes:
        runs: How often the closure has run.
        ended_well: The last evaluation gave a finite loss and finite gradients.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizer: Any,
        closure: Callable[[], Any],
        retries: int,
    ) -> None:
        self._scaler, self._optimizer = scaler, optimizer
        self._closure, self._retries = closure, retries
        self.runs = self._usable = 0
        self.ended_well = self._loss_finite = True

    def __call__(self) -> Any:
        for _ in range(self._retries + 1):
            if self.runs and self._loss_finite:
                # End the previous evaluation: one row and one move of the scale each.
                self._scaler.update()
            elif self.runs:
                # The loss was not finite: the scale stays.
                self._scaler.reset()
            self.runs += 1
            with torch.enable_grad():
                loss = self._closure()
            if loss is None or is_scaled(loss):
                raise _wrong_return(loss)
            self._scaler.unscale_(self._optimizer)
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
            self._loss_finite = math.isfinite(value)
            self.ended_well = self._loss_finite and self._is_finite()
            if self.ended_well:
                self._usable += 1
                return loss
            if not self._loss_finite:
                break
        if not self._usable:
            raise _FirstFailed
        for param in _params_of(self._optimizer):
            if param.grad is not None:
                param.grad.zero_()
        return torch.full_like(torch.as_tensor(loss).detach().float(), LARGE_LOSS)

    def _is_finite(self) -> bool:
        states = self._scaler._iteration.states[id(self._optimizer)]
        return not any(flag.item() for flag in states["found_inf_per_device"].values())


def _wrong_return(loss: Any) -> OrderError:
    what = "nothing" if loss is None else "the scaled loss"
    return OrderError(
        f"The closure returned {what}. The optimizer compares the losses of its "
        "evaluations with the unscaled gradients. End the closure with `return loss`, "
        "the loss before scaling.",
        code="GS108",
    )


def _unscales_later(kind: str) -> OrderError:
    return OrderError(
        f"step_with_closure() was given {kind} of gradscale.torch.optim with float16 "
        "parameters. It unscales their gradients in its own pass, after the closure, "
        "which it calls once. Call closure() and then scaler.step(optimizer). Or use "
        "an optimizer of torch in gradscale.torch.master_weights(optimizer).",
        code="GS108",
    )


class _Backup:
    """The weights, masters and the state of an optimizer before a step."""

    def __init__(self, optimizer: Any) -> None:
        weights = _params_of(optimizer)
        if isinstance(optimizer, MasterWeights):
            # An f32 parameter is its own master.
            weights = list(
                {id(w): w for w in [*weights, *optimizer.targets()]}.values()
            )
            optimizer = optimizer.inner
        self._optimizer = optimizer
        self._weights = [(weight, weight.detach().clone()) for weight in weights]
        # By parameter: a deep copy of the whole would copy the keys.
        self._state = {k: copy.deepcopy(v) for k, v in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights and state."""
        for weight, value in self._weights:
            weight.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
