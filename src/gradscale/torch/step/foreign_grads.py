"""Detects gradients accumulated from an unscaled loss.

A loss that was not scaled, or was scaled by another scaler, leaves a sum of two scales.
Hooks detect it when the gradient is accumulated. Nothing is read from the device.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradscale.torch.tensor_list import Mark, mark_of


def are_handed_on(leaves: Iterable[Tensor | None], params: set[int]) -> bool:
    """Return whether other code may pass scaled gradients on to another graph.

    The graph of a loss then ends in tensors that are no parameters: the cut between
    parts of a network, embeddings that are cached in chunks.

    Args:
        leaves: Of scaled losses; None for one that does not exist any more.
        params: The ids of the parameters of all optimizers.
    """
    return any(
        not isinstance(leaf, torch.nn.Parameter) and id(leaf) not in params
        for leaf in leaves
    )


class ForeignGrads:
    """Tracks which backward passes accumulate into the gradients of parameters.

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
        self._hooks: dict[int, RemovableHandle] = {}
        # Gradients after a foreign backward pass and any scaled passes since.
        self._marks: dict[int, Mark] = {}

    @property
    def watching(self) -> bool:
        """Whether any parameter is watched."""
        return bool(self._hooks)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Watch further parameters."""
        for param in params:
            plain = type(param) in (Tensor, torch.nn.Parameter) and param.is_leaf
            if plain and param.requires_grad and id(param) not in self._hooks:
                hook = param.register_post_accumulate_grad_hook(self._on_hook)
                self._hooks[id(param)] = hook

    def _on_hook(self, param: Tensor) -> None:
        if param.grad is not None and not param.grad.is_inference():
            self.accumulated(param, param.grad)

    def accumulated(self, param: Tensor, grad: Tensor) -> None:
        """Note a gradient after a backward pass has made it or added to it."""
        before, now = self._marks.pop(id(param), None), mark_of(grad)
        # Accumulated in place: the gradient was not cleared since the foreign pass.
        added = before is not None and now.follows(before)
        if added or not self.in_scaled_backward:
            self._marks[id(param)] = now

    def among(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradients include a foreign part."""
        return [
            param
            for param in params
            if (mark := self._marks.get(id(param))) is not None
            and mark.is_of(param.grad)
        ]

    def close(self) -> None:
        """Remove the hooks and their records."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._marks, self.in_scaled_backward = {}, {}, False


def has_other_hooks(param: Tensor) -> bool:
    """Return whether other code may write to a gradient when it is accumulated.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> ForeignGrads().watch([weight])
    >>> has_other_hooks(weight)
    False
    >>> _ = weight.register_hook(lambda grad: grad.clamp(-1.0, 1.0))
    >>> has_other_hooks(weight)
    True
    """
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return bool(param._backward_hooks) or any(
        not isinstance(getattr(hook, "__self__", None), ForeignGrads)
        for hook in hooks.values()
    )
