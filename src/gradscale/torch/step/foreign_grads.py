"""Gradients to which a backward pass has added that began at no scaled loss.

A loss whose backward pass was not scaled, or was scaled by another scaler, leaves a sum
of two scales. Until the first update hooks on the parameters notice it; wrong use is
systematic. Nothing is read from the device.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.step.optimizer_step import Mark, is_marked, mark_of


class ForeignGrads:
    """Watches which backward passes give parameters their gradients.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> foreign = ForeignGrads()
    >>> foreign.watch([weight])
    >>> weight.sum().backward()
    >>> foreign.among([weight]) == [weight]
    True
    >>> weight.grad = None
    >>> foreign.among([weight])
    []
    """

    def __init__(self) -> None:
        self._running = False
        self._hooks: dict[int, Any] = {}
        # Gradients after a foreign backward pass, and scaled ones since, by parameter.
        self._marks: dict[int, Mark] = {}

    def watch(self, leaves: Iterable[Tensor]) -> None:
        """Watch further parameters."""
        for leaf in leaves:
            if id(leaf) not in self._hooks:
                hook = leaf.register_post_accumulate_grad_hook(self._accumulated)
                self._hooks[id(leaf)] = hook

    def begin_scaled(self) -> None:
        """Note that the backward pass which runs now is that of a scaled loss."""
        self._running = True
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_scaled)

    def _end_scaled(self) -> None:
        self._running = False

    def _accumulated(self, param: Tensor) -> None:
        grad, before = param.grad, self._marks.pop(id(param), None)
        if grad is None or grad.is_inference():
            return
        now = mark_of(grad)
        # The pass has added in place: nothing was cleared since the foreign one.
        added = before is not None and before[0]() is grad and now[1] == before[1] + 1
        if added or not self._running:
            self._marks[id(param)] = now

    def among(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the parameters whose gradients hold a foreign one."""
        return [
            param
            for param in params
            if (mark := self._marks.get(id(param))) is not None
            and param.grad is not None
            and is_marked(param.grad, mark)
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._marks = {}, {}
