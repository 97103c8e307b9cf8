"""Repeats a batch at a lower scale if its gradients were not finite."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradscale.errors import ConfigError, GradscaleWarning, OrderError
from gradscale.torch.loops.window import any_rank, grads_finite
from gradscale.torch.messages import warn_at_caller
from gradscale.torch.precision.buffers import BufferGuard
from gradscale.torch.ranks.sharding import replicas_of
from gradscale.torch.rng import RngState
from gradscale.torch.scaler import GradScaler


def attempts(
    scaler: GradScaler,
    model: nn.Module,
    *,
    retries: int = 4,
    micro_batch_of: Any = None,
) -> Iterator[int]:
    """Yield until the batch has made a step; an overflow repeats the batch.

    The body of the loop is one training step, from forward to `update()`. If the step
    was skipped, random number generators, the buffers of the model and the gradients
    are restored, and the body runs again at the scale that `update()` has lowered. A
    loss that is itself not finite is not retried: no scale would help. After the last
    attempt the buffers are restored, so that a lost batch does not change them.

    Reads one flag per step on the host. All ranks take the same decision.

    >>> import torch
    >>> from gradscale.torch import GradScaler
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu", init_scale=2.0**127)
    >>> for attempt in attempts(scaler, model):
    ...     optimizer.zero_grad()
    ...     loss = 4 * model(torch.ones(1, 2)).sum()
    ...     scaler.scale(loss).backward()
    ...     scaler.step(optimizer)
    ...     scaler.update()
    >>> attempt, bool(scaler.last.applied)
    (2, True)

    Args:
        scaler: The scaler of the body.
        model: Its buffers and gradients are restored.
        retries: How often the body may run again.
        micro_batch_of: An optimizer, or several. The body is then one micro-batch of an
            accumulation window: forward and backward, without a step. Its gradients are
            read after it; what the window had accumulated before is kept in a copy.

    Yields:
        The number of the attempt, from 0.

    Raises:
        OrderError: The body has not called `update()`.
    """
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ConfigError(
            f"retries={retries!r} is not a number of further attempts. The body would "
            "never run. Pass 0 or more.",
            code="GS101",
        )
    if not scaler.is_enabled():
        yield 0
        return
    window = micro_batch_of is not None
    optimizers = _listed(micro_batch_of)
    before = _Before(scaler, model, optimizers)
    for number in range(retries + 1):
        settled = scaler._iteration.settled
        yield number
        if window:
            # No short circuit: all ranks take part in each check.
            finite = [grads_finite(scaler, each) for each in optimizers]
            done = all(finite)
            if not done:
                _back_off(scaler, optimizers)
        else:
            if scaler._iteration.settled is settled:
                raise OrderError(
                    "The body of attempts() has ended without update(). Whether the "
                    "step was taken is not decided yet. Put scaler.step() and "
                    "scaler.update() inside the loop, or pass micro_batch_of=optimizer "
                    "for one micro-batch of an accumulation window.",
                    code="GS102",
                )
            done = not _may_try_again(scaler, model)
        if done and (window or _is_applied(scaler)):
            return
        before.restore(again=not done and number < retries)
        if done:
            return


def _listed(optimizers: Any) -> list[Any]:
    if optimizers is None:
        return []
    several = isinstance(optimizers, Iterable) and not hasattr(
        optimizers, "param_groups"
    )
    return list(optimizers) if several else [optimizers]


def _is_applied(scaler: GradScaler) -> bool:
    return scaler.last is not None and scaler.last.applied


def _may_try_again(scaler: GradScaler, model: nn.Module) -> bool:
    """Return whether the batch can be run again, and should be. Syncs."""
    last = scaler.last
    if last is None or last.applied or not last.record.read:
        return False
    if any_rank(not last.record.loss_finite, replicas_of(model)):
        return False
    parts = [part.applied for part in last._parts.values()]
    if any(parts):
        warn_at_caller(
            GradscaleWarning(
                "In the body of attempts() one optimizer has stepped and another one "
                "was skipped. Running the body again would step the first one twice, "
                "so the batch is lost for the second one. Use one loop of attempts() "
                "for each optimizer.",
                code="GS102",
            )
        )
        return False
    return True


def _back_off(scaler: GradScaler, optimizers: list[Any]) -> None:
    """Lower the scale in the middle of a window, without a step."""
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scaler.update()


class _Before:
    """The initial state that a step changes, besides the weights."""

    def __init__(
        self, scaler: GradScaler, model: nn.Module, optimizers: list[Any]
    ) -> None:
        self._scaler = scaler
        self._rng = RngState()
        self._buffers = BufferGuard(model)
        groups = [group for each in optimizers for group in each.param_groups]
        held = [param for group in groups for param in group["params"]]
        params = {id(param): param for param in (*model.parameters(), *held)}
        # Only those of the current iteration: others belong to an earlier step.
        pending = scaler._iteration.scaled
        # Copies: a backward pass adds in place.
        self._grads = [
            (param, _copy_of(param.grad) if pending else None)
            for param in params.values()
        ]
        scale = scaler._get_scale_async()
        self._scale = None if scale is None else scale.clone()

    def restore(self, *, again: bool) -> None:
        """Restore the buffers; generators and gradients only if the body runs again."""
        self._buffers.restore()
        if not again:
            return
        self._rng.restore()
        # Casts of weights that autocast keeps until its outermost block ends.
        torch.clear_autocast_cache()
        now = self._scaler._get_scale_async()
        for param, grad in self._grads:
            if grad is not None and now is not None and self._scale is not None:
                grad.mul_((now / self._scale).to(grad.device))
            param.grad = _copy_of(grad)
        self._scale = None if now is None else now.clone()


def _copy_of(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()
