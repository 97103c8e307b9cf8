"""Module and gradient hooks, enabled after repeated overflows.

They are removed once steps are finite again.
"""

import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradscale.torch.locate.analysis import (
    DIVISOR,
    GraphNode,
    Observation,
    Operation,
    locate,
)
from gradscale.torch.locate.autograd_graph import (
    data_saved_by,
    differences_saved_by,
    divisor_saved_by,
    is_view,
    leaf_behind,
    nodes_of,
    operation_name,
)
from gradscale.torch.locate.forward_hooks import (
    ForwardHooks,
    is_plain,
    is_plain_eager,
    plain_tensors,
)
from gradscale.torch.locate.module_tracker import (
    NO_MODULE,
    ModuleName,
    ModuleTracker,
    in_backward,
)
from gradscale.torch.locate.result import Location
from gradscale.torch.locate.tensor_stats import (
    DeviceStats,
    device_stats_of,
    to_host,
)

# A single finite step may be chance: another batch may overflow at the same scale.
FINITE_STEPS = 3
# An evaluation in training mode with gradients looks like training and never ends a
# step. Each measurement keeps about 1 kB.
MAX_OBSERVATIONS = 2**16


class _Measured(NamedTuple):
    """A tensor that was measured, at a version, and the index of its statistics."""

    tensor: Any
    version: int
    stats: int


class ModuleHooks:
    """Observes modules and gradients of a run that has failed. No host sync.

    While enabled, the inputs and outputs of every module and every gradient between
    operations are measured; after the iteration, `locate()` returns the first
    non-finite value. Only training passes and plain dense tensors are observed. While
    disabled there is no hook, no tensor and no cost. An exception inside the hooks
    does not reach the run: see `failure`.

    >>> import torch
    >>> layer, hooks = nn.Linear(1, 1, bias=False), ModuleHooks()
    >>> hooks.enable(layer)
    True
    >>> loss = layer(torch.full((1, 1), float("inf"))).sum()
    >>> hooks.watch_loss(loss * 2.0, loss)
    >>> hooks.locate(scale=2.0).where
    'forward of the model itself (Linear), input: 1 of 1 inf'
    >>> hooks.disable()
    """

    def __init__(self) -> None:
        self.enabled = False
        self._hooks = ForwardHooks(self._before, self._after)
        self._modules = ModuleTracker()
        self._model: weakref.ref[nn.Module] | None = None
        self._finite_steps, self._enabled_for = 0, FINITE_STEPS
        self._backward_order: list[str] = []
        self._node_handles: list[RemovableHandle] = []
        self._clear()

    @property
    def backward_order(self) -> list[str]:
        """Parameters in the order of their gradients, as far as it was observed."""
        return list(self._backward_order)

    @property
    def failure(self) -> str | None:
        """The exception inside the hooks, in words; they observe nothing after it."""
        return self._hooks.failure

    def enable(self, model: nn.Module, finite_steps: int = FINITE_STEPS) -> bool:
        """Register the hooks; if they are, restart the count of finite steps.

        Args:
            model: Its modules are observed.
            finite_steps: Finite steps in a row after which the hooks are removed.

        Returns:
            Whether they are registered. Not after a failure, and not for a compiled
            model, which would be recompiled with the hooks and again without them.
        """
        self._finite_steps, self._enabled_for = 0, finite_steps
        if not self.enabled and self._hooks.register(model):
            self._model = weakref.ref(model)
            self.enabled = True
        return self.enabled

    def disable(self) -> None:
        """Remove the hooks and drop all observations."""
        self._hooks.remove()
        self._model, self.enabled = None, False
        self._finite_steps = 0
        self._clear()

    def forget(self) -> None:
        """Drop the observations of an iteration that is abandoned."""
        self._clear()

    def finite_step(self) -> None:
        """Count a finite step and drop its observations; disable after some in a row.

        `locate` and `enable` restart the count.
        """
        self._finite_steps += 1
        if self._finite_steps >= self._enabled_for:
            self.disable()
        else:
            self._clear()

    def watch_loss(self, scaled: Tensor, loss: Tensor | None = None) -> None:
        """Observe the backward pass of a scaled loss; does nothing while disabled.

        Args:
            scaled: The loss that `backward()` will be called on.
            loss: The same before scaling.
        """
        if self.enabled and is_plain_eager():
            self._hooks.guarded(self._watch, scaled, scaled if loss is None else loss)

    def locate(self, scale: float) -> Location:
        """Return the first non-finite value and drop the observations.

        Syncs once per device.

        Args:
            scale: The scale that multiplied the loss.
        """
        location = self._hooks.guarded(self._locate, scale)
        self._finite_steps, self._enabled_for = 0, FINITE_STEPS
        self._clear()
        if location is None:
            return Location(found=False, instrument="hooks", scale=scale)
        return location

    def _locate(self, scale: float) -> Location:
        stats = to_host([self._stats[i] for i in range(len(self._stats))])
        location = locate(self._observations, self._nodes, stats, scale)
        model = None if self._model is None else self._model()
        if model is None or location.module is None or location.direction != "forward":
            return location
        return replace(location, gain=gain_of(model.get_submodule(location.module)))

    def _clear(self) -> None:
        # A graph that the user keeps would go on calling the hooks.
        for handle in self._node_handles:
            handle.remove()
        self._node_handles = []
        # Keyed by a number from an iterator: backward has one thread per device.
        self._stats: dict[int, DeviceStats] = {}
        self._numbers = count()
        self._observations: list[Observation] = []
        self._nodes: list[GraphNode] = []
        self._measured: dict[int, _Measured] = {}
        self._has_outputs = False
        self._modules.clear()
        self._hooks.begin_step()

    def _watch(self, scaled: Tensor, loss: Tensor) -> None:
        nodes = nodes_of([scaled])
        outside = [node for node in nodes if self._modules.of_node(node) == NO_MODULE]
        model = None if self._model is None else self._model()
        own = set() if model is None else _memory_of(model)
        divisors = [
            # A count is no floating-point number.
            (DIVISOR, torch.where(divisor == 0, torch.inf, 0.0))
            for node in outside
            if is_plain(divisor := divisor_saved_by(node))
        ]
        # The statistics of a norm in evaluation mode are saved too.
        given = [
            ("target", data)
            for node in outside
            for data in data_saved_by(node)
            if is_plain(data) and data.data_ptr() not in own
        ]
        given += [
            ("difference", each)
            for node in outside
            for each, behind in differences_saved_by(node)
            if self._modules.of_node(behind) != NO_MODULE
        ]
        for role, tensor in (
            *divisors,
            *given,
            ("loss", loss),
            ("scaled loss", scaled),
        ):
            if is_plain(tensor):
                self._observe(role, NO_MODULE, NO_MODULE, tensor)
        if len(self._nodes) + len(nodes) > MAX_OBSERVATIONS:
            return
        operations = {
            node: Operation(
                operation_name(node), self._modules.of_node(node), is_view=is_view(node)
            )
            for node in nodes
        }
        named = () if model is None else model.named_parameters()
        names = {id(param): name for name, param in named}
        uses = Counter(each for node in nodes for each, _ in node.next_functions)
        for node, operation in operations.items():
            following = [each for each, _ in node.next_functions]
            operation.producers = [operations[n] for n in following if n in operations]
            leaves = [names.get(id(leaf_behind(each))) for each in following]
            index = len(self._nodes)
            self._nodes.append(GraphNode(operation, leaves))
            # The gradient of a node with several users is a sum made before it runs.
            summed = uses[node] > 1
            if not operation.is_view or summed or any(leaves):
                hook = partial(self._on_gradients, index, summed)
                self._node_handles.append(node.register_hook(hook))

    def _before(self, name: ModuleName, inputs: Any) -> None:
        if in_backward() or len(self._observations) >= MAX_OBSERVATIONS:
            return
        # An input is measured before its module becomes the current one.
        for tensor in plain_tensors(inputs):
            self._observe("input", name, self._modules.current, tensor)
        self._modules.enter(name)

    def _after(self, name: ModuleName, outputs: Any) -> None:
        if in_backward() or len(self._observations) >= MAX_OBSERVATIONS:
            return
        for tensor in plain_tensors(outputs):
            self._observe("output", name, name, tensor)
        self._modules.leave(name)

    def _observe(
        self, role: str, module: ModuleName, caller: ModuleName, tensor: Tensor
    ) -> None:
        """Measure a tensor, unless it was measured before and not written since."""
        known = self._measured.get(id(tensor))
        if (
            known is not None
            and known.tensor() is tensor
            and known.version == _version(tensor)
        ):
            number: int | None = known.stats
        else:
            number = self._measure(tensor)
        if number is None:
            return
        self._measured[id(tensor)] = _Measured(
            weakref.ref(tensor), _version(tensor), number
        )
        outside = caller == NO_MODULE or not self._has_outputs
        given = role == "input" and outside and tensor.grad_fn is None
        self._has_outputs = self._has_outputs or role == "output"
        self._observations.append(
            Observation(role, module, caller, number, given=given)
        )

    def _measure(self, tensor: Tensor) -> int | None:
        """Measure a tensor; return the number of its statistics."""
        stats = device_stats_of(tensor)
        if stats is None:
            return None
        number = next(self._numbers)
        self._stats[number] = stats
        return number

    def _on_gradients(
        self,
        index: int,
        summed: bool,
        grad_inputs: tuple[Tensor | None, ...],
        grad_outputs: tuple[Tensor | None, ...],
    ) -> None:
        if is_plain_eager():
            sums = grad_outputs if summed else ()
            self._hooks.guarded(self._observe_gradients, index, sums, grad_inputs)

    def _observe_gradients(
        self,
        index: int,
        sums: tuple[Tensor | None, ...],
        grad_inputs: tuple[Tensor | None, ...],
    ) -> None:
        for grad in sums:
            self._observe_gradient("grad_output", index, grad)
        leaves = self._nodes[index].leaves
        for grad, leaf in zip(grad_inputs, leaves, strict=False):
            role = "grad_input" if leaf is None else f"gradient of {leaf}"
            self._observe_gradient(role, index, grad)
            seen_first = leaf not in self._backward_order
            if grad is not None and leaf is not None and seen_first:
                self._backward_order.append(leaf)

    def _observe_gradient(self, role: str, index: int, grad: Tensor | None) -> None:
        number = self._measure(grad) if is_plain(grad) else None
        if number is not None:
            module = self._nodes[index].operation.module
            self._observations.append(Observation(role, module, module, number, index))


def _memory_of(model: nn.Module) -> set[int]:
    """Return the addresses of the parameters and buffers of a model."""
    tensors = (*model.parameters(), *model.buffers())
    return {tensor.data_ptr() for tensor in tensors if is_plain(tensor)}


def gain_of(module: nn.Module) -> float:
    """Return by how much a layer multiplies independent inputs; 0 if unknown. Syncs.

    >>> import torch
    >>> layer = nn.Linear(100, 3)
    >>> _ = nn.init.constant_(layer.weight, 2.0)
    >>> gain_of(layer)
    20.0
    """
    weight = getattr(module, "weight", None)
    # Of an embedding, a row is an output.
    if not (is_plain(weight) and weight.dim() >= 2) or isinstance(module, nn.Embedding):
        return 0.0
    inputs = weight[0].numel()
    return float(weight.detach().float().square().mean().sqrt()) * inputs**0.5


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
