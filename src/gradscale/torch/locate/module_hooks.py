"""Instruments for ordinary iterations: on after a failure, off when all is well."""

import weakref
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradscale.torch.devices import host_may_act
from gradscale.torch.locate.analysis import Event, Step, finding
from gradscale.torch.locate.autograd_graph import (
    leaf_behind,
    nodes_of,
    only_moves,
    operation_name,
)
from gradscale.torch.locate.module_tracker import NOWHERE, Place, Places, in_backward
from gradscale.torch.locate.result import Diagnosis
from gradscale.torch.locate.tensor_stats import Sighting, settled, sighted

# One good step may be luck: the next scale is tried on another batch.
GOOD_STEPS = 3


class _Known(NamedTuple):
    """A tensor that was looked at, and which sighting is of it."""

    tensor: Any
    version: int
    sighting: int


class Armed:
    """Watches modules and gradients of a run that has just failed. No host sync.

    While it is armed, every module's inputs and outputs and every gradient between
    operations are looked at; `finding()` tells after the iteration where a value
    stopped being finite. Disarmed it is nothing: no hook, no tensor, no cost.

    >>> import torch
    >>> layer, armed = nn.Linear(1, 1, bias=False), Armed()
    >>> armed.arm(layer)
    True
    >>> loss = layer(torch.full((1, 1), float("inf"))).sum()
    >>> armed.watch_loss(loss * 2.0, loss)
    >>> armed.finding(scale=2.0).where
    'forward of the model itself (Linear), input: 1 of 1 inf'
    >>> armed.disarm()
    """

    def __init__(self) -> None:
        self._places: Places | None = None
        self._hooks: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._good = 0
        self._order: list[str] = []
        self._forget()

    @property
    def armed(self) -> bool:
        """Whether the instruments are on."""
        return self._places is not None

    @property
    def order(self) -> list[str]:
        """Parameters in the order in which backward came to them, if it was seen."""
        return list(self._order)

    def arm(self, model: nn.Module) -> bool:
        """Turn the instruments on; if they are, go on for another while.

        Returns:
            Whether they are on. They stay off for a compiled model, which would be
            compiled again for the hooks, and without them.
        """
        self._good = 0
        if self._places is not None or any(map(is_compiled, model.modules())):
            return self.armed
        self._names = {id(param): name for name, param in model.named_parameters()}
        places = Places(model)
        # Inputs are looked at before the module is entered, outputs before it is left.
        self._hooks = [
            register_module_forward_pre_hook(self._saw_inputs),
            register_module_forward_hook(self._saw_outputs),
        ]
        places.follow()
        self._places = places
        return True

    def disarm(self) -> None:
        """Turn the instruments off and forget everything."""
        if self._places is not None:
            self._places.leave()
        for hook in self._hooks:
            hook.remove()
        self._places, self._hooks, self._names = None, [], {}
        self._good = 0
        self._forget()

    def well(self) -> None:
        """Take note of a good step; after three in a row disarm."""
        self._good += 1
        if self._good >= GOOD_STEPS:
            self.disarm()
        else:
            self._forget()

    def watch_loss(self, scaled: Tensor, loss: Tensor | None = None) -> None:
        """Watch the backward pass of a scaled loss; does nothing while disarmed.

        Args:
            scaled: The loss that `backward()` will be called on.
            loss: The same before it was scaled.
        """
        places = self._places
        if places is None or not host_may_act():
            return
        self._see("loss", NOWHERE, NOWHERE, scaled if loss is None else loss)
        self._see("scaled loss", NOWHERE, NOWHERE, scaled)
        nodes = nodes_of([scaled])
        first = len(self._steps)
        numbers = {node: first + i for i, node in enumerate(nodes)}
        uses = Counter(each for node in nodes for each, _ in node.next_functions)
        for node in nodes:
            following = [each for each, _ in node.next_functions]
            step = Step(
                operation=operation_name(node),
                place=places.of_node(node),
                following=[numbers[each] for each in following if each in numbers],
                leaves=[self._leaf_name(each) for each in following],
            )
            self._steps.append(step)
            summed = uses[node] > 1
            if not only_moves(node) or summed or any(step.leaves):
                watch = partial(self._saw_gradients, numbers[node], summed)
                self._on_nodes.append(node.register_hook(watch))

    def finding(self, scale: float) -> Diagnosis:
        """Return where a value stopped being finite, and forget the iteration.

        Waits for the device once.

        Args:
            scale: The scale that multiplied the loss.
        """
        seen = settled(self._sightings)
        dtypes = [each.dtype for each in self._sightings]
        found = finding(self._events, self._steps, seen, dtypes, scale)
        self._good = 0
        self._forget()
        return found

    def _forget(self) -> None:
        # A graph that its owner keeps would go on calling.
        for hook in getattr(self, "_on_nodes", []):
            hook.remove()
        self._on_nodes: list[RemovableHandle] = []
        self._sightings: list[Sighting] = []
        self._events: list[Event] = []
        self._steps: list[Step] = []
        self._known: dict[int, _Known] = {}
        if self._places is not None:
            self._places.forget()

    def _leaf_name(self, node: Any) -> str | None:
        leaf = leaf_behind(node)
        return None if leaf is None else self._names.get(id(leaf))

    def _saw_inputs(self, module: nn.Module, inputs: Any) -> None:
        if self._places is None or not host_may_act() or in_backward():
            return
        place, around = self._places.of_module(module), self._places.here
        for tensor in tree_leaves(inputs):
            self._see("input", place, around, tensor)

    def _saw_outputs(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._places is None or not host_may_act() or in_backward():
            return
        place = self._places.of_module(module)
        for tensor in _tensors(outputs):
            self._see("output", place, place, tensor)

    def _see(self, what: str, place: Place, around: Place, tensor: Any) -> None:
        """Look at a tensor, unless it is the very one that was looked at before."""
        if not isinstance(tensor, Tensor):
            return
        known = self._known.get(id(tensor))
        if (
            known is not None
            and known.tensor() is tensor
            and known.version == _version(tensor)
        ):
            self._events.append(Event(what, place, around, known.sighting))
            return
        sighting = sighted(tensor)
        if sighting is not None:
            number = len(self._sightings)
            self._sightings.append(sighting)
            self._events.append(Event(what, place, around, number))
            kept = _Known(weakref.ref(tensor), _version(tensor), number)
            self._known[id(tensor)] = kept

    def _saw_gradients(
        self,
        number: int,
        summed: bool,
        grad_inputs: tuple[Tensor | None, ...],
        grad_outputs: tuple[Tensor | None, ...],
    ) -> None:
        step = self._steps[number]
        for grad in grad_outputs if summed else ():
            self._see_gradient("grad_output", step, number, None, grad)
        for grad, leaf in zip(grad_inputs, step.leaves, strict=False):
            self._see_gradient("grad_input", step, number, leaf, grad)
            if grad is not None and leaf is not None and leaf not in self._order:
                self._order.append(leaf)

    def _see_gradient(
        self,
        what: str,
        step: Step,
        number: int,
        leaf: str | None,
        grad: Tensor | None,
    ) -> None:
        sighting = None if grad is None else sighted(grad)
        if sighting is not None:
            named = what if leaf is None else f"gradient of {leaf}"
            place = len(self._sightings)
            self._sightings.append(sighting)
            self._events.append(Event(named, step.place, step.place, place, number))


def _tensors(outputs: Any) -> list[Any]:
    """Return the tensors of a module's outputs, dataclasses looked into."""
    leaves = []
    for each in tree_leaves(outputs):
        inside = getattr(each, "__dataclass_fields__", None)
        leaves += [each] if inside is None else tree_leaves(vars(each))
    return leaves


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was called on the module itself."""
    wrapped = type(module).__name__ == "OptimizedModule"
    return wrapped or module._compiled_call_impl is not None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
