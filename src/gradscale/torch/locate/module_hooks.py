"""Module and gradient hooks, enabled after repeated overflows.

They are removed once steps are finite again.
"""

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

from gradscale.torch.devices import can_touch_host
from gradscale.torch.locate.analysis import GraphNode, Observation, Operation, locate
from gradscale.torch.locate.autograd_graph import (
    is_view,
    leaf_behind,
    nodes_of,
    operation_name,
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


class _Measured(NamedTuple):
    """A tensor that was measured, at a version, and the index of its statistics."""

    tensor: Any
    version: int
    stats: int


class ModuleHooks:
    """Observes modules and gradients of a run that has failed. No host sync.

    While enabled, the inputs and outputs of every module and every gradient between
    operations are measured; after the iteration, `locate()` returns the first
    non-finite value. While disabled there is no hook, no tensor and no cost.

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
        self._modules: ModuleTracker | None = None
        self._handles: list[RemovableHandle] = []
        self._names: dict[int, str] = {}
        self._finite_steps = 0
        self._backward_order: list[str] = []
        self._node_handles: list[RemovableHandle] = []
        self._clear()

    @property
    def backward_order(self) -> list[str]:
        """Parameters in the order of their gradients, as far as it was observed."""
        return list(self._backward_order)

    def enable(self, model: nn.Module) -> bool:
        """Register the hooks; if they are, restart the count of finite steps.

        Returns:
            Whether they are registered. Not for a compiled model, which would be
            compiled again with hooks, and once more without them.
        """
        self._finite_steps = 0
        if self._modules is not None or any(map(is_compiled, model.modules())):
            return self.enabled
        self._names = {id(param): name for name, param in model.named_parameters()}
        modules = ModuleTracker(model)
        # Before those of the tracker: an input is measured before its module becomes
        # the current one, an output while it still is.
        self._handles = [
            register_module_forward_pre_hook(self._on_inputs),
            register_module_forward_hook(self._on_outputs),
        ]
        modules.enable()
        self._modules, self.enabled = modules, True
        return True

    def disable(self) -> None:
        """Remove the hooks and drop all observations."""
        if self._modules is not None:
            self._modules.disable()
        for handle in self._handles:
            handle.remove()
        self._modules, self._handles, self._names = None, [], {}
        self.enabled = False
        self._finite_steps = 0
        self._clear()

    def finite_step(self) -> None:
        """Count a finite step and drop its observations; disable after three in a row.

        `locate` and `enable` restart the count.
        """
        self._finite_steps += 1
        if self._finite_steps >= FINITE_STEPS:
            self.disable()
        else:
            self._clear()

    def watch_loss(self, scaled: Tensor, loss: Tensor | None = None) -> None:
        """Observe the backward pass of a scaled loss; does nothing while disabled.

        Args:
            scaled: The loss that `backward()` will be called on.
            loss: The same before scaling.
        """
        modules = self._modules
        if modules is None or not can_touch_host():
            return
        self._observe("loss", NO_MODULE, NO_MODULE, scaled if loss is None else loss)
        self._observe("scaled loss", NO_MODULE, NO_MODULE, scaled)
        nodes = nodes_of([scaled])
        operations = {
            node: Operation(
                operation_name(node), modules.of_node(node), is_view=is_view(node)
            )
            for node in nodes
        }
        uses = Counter(each for node in nodes for each, _ in node.next_functions)
        for node, operation in operations.items():
            following = [each for each, _ in node.next_functions]
            operation.producers = [operations[n] for n in following if n in operations]
            leaves = [self._leaf_name(each) for each in following]
            index = len(self._nodes)
            self._nodes.append(GraphNode(operation, leaves))
            # The gradient of a node with several users is a sum made before it runs.
            summed = uses[node] > 1
            if not operation.is_view or summed or any(leaves):
                hook = partial(self._on_gradients, index, summed)
                self._node_handles.append(node.register_hook(hook))

    def locate(self, scale: float) -> Location:
        """Return the first non-finite value and drop the observations.

        Syncs once per device.

        Args:
            scale: The scale that multiplied the loss.
        """
        stats = to_host(self._stats)
        location = locate(self._observations, self._nodes, stats, scale)
        self._finite_steps = 0
        self._clear()
        return location

    def _clear(self) -> None:
        # A graph that the user keeps would go on calling the hooks.
        for handle in self._node_handles:
            handle.remove()
        self._node_handles = []
        self._stats: list[DeviceStats] = []
        self._observations: list[Observation] = []
        self._nodes: list[GraphNode] = []
        self._measured: dict[int, _Measured] = {}
        if self._modules is not None:
            self._modules.clear()

    def _leaf_name(self, node: Any) -> str | None:
        leaf = leaf_behind(node)
        return None if leaf is None else self._names.get(id(leaf))

    def _on_inputs(self, module: nn.Module, inputs: Any) -> None:
        if self._modules is None or not can_touch_host() or in_backward():
            return
        name, caller = self._modules.of_module(module), self._modules.current
        for tensor in tree_leaves(inputs):
            self._observe("input", name, caller, tensor)

    def _on_outputs(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._modules is None or not can_touch_host() or in_backward():
            return
        name = self._modules.of_module(module)
        for tensor in _tensors(outputs):
            self._observe("output", name, name, tensor)

    def _observe(
        self, role: str, module: ModuleName, caller: ModuleName, tensor: Any
    ) -> None:
        """Measure a tensor, unless it was measured before and not written since."""
        if not isinstance(tensor, Tensor):
            return
        known = self._measured.get(id(tensor))
        if (
            known is not None
            and known.tensor() is tensor
            and known.version == _version(tensor)
        ):
            self._observations.append(Observation(role, module, caller, known.stats))
            return
        stats = device_stats_of(tensor)
        if stats is not None:
            index = len(self._stats)
            self._stats.append(stats)
            self._observations.append(Observation(role, module, caller, index))
            measured = _Measured(weakref.ref(tensor), _version(tensor), index)
            self._measured[id(tensor)] = measured

    def _on_gradients(
        self,
        index: int,
        summed: bool,
        grad_inputs: tuple[Tensor | None, ...],
        grad_outputs: tuple[Tensor | None, ...],
    ) -> None:
        for grad in grad_outputs if summed else ():
            self._observe_gradient("grad_output", index, grad)
        leaves = self._nodes[index].leaves
        for grad, leaf in zip(grad_inputs, leaves, strict=False):
            role = "grad_input" if leaf is None else f"gradient of {leaf}"
            self._observe_gradient(role, index, grad)
            seen_first = leaf not in self._backward_order
            if grad is not None and leaf is not None and seen_first:
                self._backward_order.append(leaf)

    def _observe_gradient(self, role: str, index: int, grad: Tensor | None) -> None:
        stats = None if grad is None else device_stats_of(grad)
        if stats is not None:
            module = self._nodes[index].operation.module
            observed = Observation(role, module, module, len(self._stats), index)
            self._stats.append(stats)
            self._observations.append(observed)


def _tensors(outputs: Any) -> list[Any]:
    """Return the leaves of a module's outputs, those inside dataclasses included."""
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
