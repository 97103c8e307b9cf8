"""Gradients to which a backward pass has added that began at no scaled loss.

A loss that was not scaled, or was scaled by another scaler, leaves a sum of two scales.
Hooks notice it when the gradient is accumulated. Nothing is read from the device.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscale.torch.step.optimizer_step import Mark, mark_of


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

    Attributes:
        in_scaled_backward: A backward pass of a scaled loss is running.
    """

    def __init__(self) -> None:
        self.in_scaled_backward = False
        # Nodes and their hooks, by parameter: without a reference the node is made
        # anew. Hooks on the parameters would be taken for those of other code.
        self._hooks: dict[int, tuple[Any, Any]] = {}
        # Gradients after a foreign backward pass, and scaled ones since.
        self._marks: dict[int, Mark] = {}

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch further parameters."""
        for param in params:
            node = None if id(param) in self._hooks else _accumulator(param)
            if node is not None:
                hook = node.register_hook(partial(self._on_hook, weakref.ref(param)))
                self._hooks[id(param)] = node, hook

    def _on_hook(self, to: "weakref.ref[Tensor]", *_: object) -> None:
        param = to()
        if param is None or param.grad is None or param.grad.is_inference():
            return
        self.accumulated(param, param.grad)

    def accumulated(self, param: Tensor, grad: Tensor) -> None:
        """Note a gradient after a backward pass has made it or added to it."""
        before, now = self._marks.pop(id(param), None), mark_of(grad)
        # The pass has added in place: nothing was cleared since the foreign one.
        added = before is not None and before[0]() is grad and now[1] == before[1] + 1
        if added or not self.in_scaled_backward:
            self._marks[id(param)] = now

    def among(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the parameters whose gradients hold a foreign part."""
        return [
            param
            for param in params
            if (mark := self._marks.get(id(param))) is not None
            and param.grad is not None
            and mark[0]() is param.grad
        ]

    def close(self) -> None:
        """Remove the hooks and forget what they have seen."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks, self._marks, self.in_scaled_backward = {}, {}, False


def _accumulator(param: Tensor) -> Any:
    """Return the node that adds to the gradient of a leaf; None for others."""
    if type(param) not in (Tensor, torch.nn.Parameter) or not param.requires_grad:
        return None
    with torch.enable_grad():
        node = param.view_as(param).grad_fn
    return None if node is None else node.next_functions[0][0]
