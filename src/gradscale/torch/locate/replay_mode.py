"""Observes every operation of a replayed forward and backward pass."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscale.torch.locate.analysis import Operation, Origin
from gradscale.torch.locate.autograd_graph import operation_name, plain_name
from gradscale.torch.locate.module_tracker import (
    NO_MODULE,
    ModuleTracker,
    caller_line,
    next_sequence_nr,
)
from gradscale.torch.locate.side_effects import WeightBackup, storage_address
from gradscale.torch.locate.tensor_stats import TensorStats, stats_of

# Their outputs are uninitialised memory.
UNINITIALISED = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


class _Input(NamedTuple):
    """A tensor argument of an operation, measured before it ran.

    Attributes:
        tensor: The argument.
        address: Of its storage.
        stats: Its statistics; None if it cannot hold inf or NaN.
    """

    tensor: Tensor
    address: int
    stats: TensorStats | None


class ReplayMode(TorchDispatchMode):
    """Measures the inputs and outputs of every operation while it is active.

    It runs below autograd, so it observes the parts of composite functions and the
    operations of backward. Syncs at every operation.

    Attributes:
        origins: Every origin found so far, in order.
        forward_peak: The largest finite magnitude of the forward pass.
        node: The autograd node that is running; None between two nodes.
        backward: A backward pass is running.
        paused: Operations are not observed, such as those of gradscale's hooks.
    """

    # Higher-order operators pass through unobserved.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, modules: ModuleTracker) -> None:
        super().__init__()
        self.origins: list[Origin] = []
        self.forward_peak = 0.0
        self.node: Any = None
        self.backward = False
        self.paused = False
        self._modules = modules
        self._weights = WeightBackup(model)
        named = [*model.named_parameters(), *model.named_buffers()]
        # By first element, then by storage: several may share one.
        self._names_by_start = {_start(tensor): name for name, tensor in named[::-1]}
        self._names = {storage_address(tensor): name for name, tensor in named[::-1]}
        # By storage address: the last writer, and the origins of non-finite values.
        self._writers: dict[int, Operation] = {}
        self._origins_at: dict[int, list[Origin]] = {}
        # By sequence number of the autograd node.
        self._operations: dict[int, Operation] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and measure its inputs and outputs."""
        kwargs = kwargs or {}
        if self.paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if any(map(_is_wrapper, types)):
            # Operations on the wrapped tensors are dispatched one by one.
            return NotImplemented
        arguments = tree_leaves((args, kwargs))
        inputs = [
            _Input(each, storage_address(each), stats_of(each))
            for each in arguments
            if isinstance(each, Tensor) and not each.is_meta
        ]
        for tensor in _written(func, args, kwargs):
            self._weights.before_write(tensor)
        result = func(*args, **kwargs)
        name = plain_name(func._schema.name)
        if name == "mul" and len(args) > 1 and args[0] is args[1]:
            name = "square"
        if name not in UNINITIALISED:
            operation = self._operation(func, name, arguments, inputs)
            for output in tree_leaves(result):
                if isinstance(output, Tensor) and not output.is_meta:
                    self._observe(operation, inputs, output)
        return result

    def restore_weights(self) -> None:
        """Undo the pass's writes to weights."""
        self._weights.restore()

    def origins_of(self, tensors: Iterable[Tensor]) -> list[Origin]:
        """Return the origins of the non-finite values in tensors."""
        found: dict[int, Origin] = {}
        for tensor in tensors:
            stats = stats_of(tensor)
            if stats is not None and not stats.finite:
                for origin in self._origins_at.get(storage_address(tensor), []):
                    found[origin.order] = origin
        return list(found.values())

    def operation_of(self, node: Any) -> Operation:
        """Return the forward operation of an autograd node."""
        known = self._operations.get(node._sequence_nr())
        custom = isinstance(node, torch.autograd.function.BackwardCFunction)
        if known is not None and not custom:
            return known
        # A custom function: the operation that was observed is only one of its parts.
        line = None if known is None else known.line
        module = self._modules.of_node(node)
        return Operation(operation_name(node), module, line=line)

    def add_unobserved(self, node: Any, tensor: Tensor, stats: TensorStats) -> None:
        """Add an origin for a gradient that no observed operation computed."""
        address = storage_address(tensor)
        if not self._origins_at.get(address):
            operation = self.operation_of(node)
            origin = self._new_origin(operation, stats, "grad_input", [])
            self._origins_at[address] = [origin]

    def _operation(
        self, func: Any, name: str, arguments: list[Any], inputs: list[_Input]
    ) -> Operation:
        operation = Operation(
            name,
            NO_MODULE,
            inputs=[each.stats for each in inputs if each.stats is not None],
            constants=tuple(
                float(each)
                for each in arguments
                if isinstance(each, (int, float)) and not isinstance(each, bool)
            ),
            producers=[
                self._writers[each.address]
                for each in inputs
                if each.address in self._writers
            ],
            is_view=bool(func.is_view)
            or name in {"detach", "clone", "alias", "expand"},
        )
        if self._in_backward():
            if self.node is not None:
                operation.module = self._modules.of_node(self.node)
            return operation
        operation.module, operation.line = self._modules.current, caller_line()
        # Autograd creates the node before it dispatches the operation. Later operations
        # without a node have the same number and must not replace it.
        self._operations.setdefault(next_sequence_nr() - 1, operation)
        return operation

    def _observe(
        self, operation: Operation, inputs: list[_Input], output: Tensor
    ) -> None:
        address = storage_address(output)
        stats = stats_of(output)
        in_place = any(address == each.address for each in inputs)
        if not (operation.is_view and in_place):
            self._writers[address] = operation
        if stats is None or stats.finite:
            if not in_place:
                self._origins_at.pop(address, None)
            if stats is not None and not self.backward:
                self.forward_peak = max(self.forward_peak, stats.peak)
            return
        sources = self._sources(operation, inputs)
        before = [each.stats for each in inputs if each.stats is not None]
        nan_before = any(each.nan for each in before)
        inf_before = any(each.inf for each in before)
        new_nan = stats.nan and not nan_before
        if new_nan or (stats.inf and not inf_before and not nan_before):
            tensor = "grad_input" if self._in_backward() else "output"
            origin = self._new_origin(operation, stats, tensor, sources)
            written = any(abs(c) == float("inf") for c in operation.constants)
            origin.is_mask = written and origin.kind == "inf" and tensor == "output"
            sources = [origin] if new_nan else [*sources, origin]
        self._origins_at[address] = sources

    def _sources(self, operation: Operation, inputs: list[_Input]) -> list[Origin]:
        """Return the origins among the inputs; one from outside becomes an origin."""
        found: dict[int, Origin] = {}
        for tensor, address, stats in inputs:
            if stats is None or stats.finite:
                continue
            if address not in self._origins_at:
                by_storage = self._names.get(address)
                name = self._names_by_start.get(_start(tensor), by_storage)
                role = "input" if name is None else f"parameter {name}"
                origin = self._new_origin(operation, stats, role, [])
                self._origins_at[address] = [origin]
            found |= {origin.order: origin for origin in self._origins_at[address]}
        return list(found.values())

    def _new_origin(
        self,
        operation: Operation,
        stats: TensorStats,
        tensor: str,
        sources: list[Origin],
    ) -> Origin:
        origin = Origin(
            order=len(self.origins),
            direction="forward",
            operation=operation,
            tensor=tensor,
            stats=stats,
            peak=operation.peak,
            sources=sources,
        )
        if self._in_backward() and not origin.is_given:
            origin.direction, origin.in_node = "backward", self.node is not None
            # In backward, the forward operation whose gradient it is.
            if self.node is not None:
                origin.operation = self.operation_of(self.node)
        self.origins.append(origin)
        return origin

    def _in_backward(self) -> bool:
        # Checkpointing runs parts of forward again in backward, with gradients enabled.
        return self.backward and not torch.is_grad_enabled()


def _start(tensor: Tensor) -> int:
    """Return the address of the first element."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.data_ptr() if strided else id(tensor)


def _is_wrapper(tensor_class: type) -> bool:
    """Return whether a tensor subclass dispatches to tensors that it wraps."""
    own = getattr(tensor_class, "__torch_dispatch__", None)
    return own is not None and own is not torch._C._disabled_torch_dispatch_impl


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    named = [*zip(arguments, args, strict=False)]
    named += [(a, kwargs[a.name]) for a in arguments if a.name in kwargs]
    written = [
        v for a, v in named if a.alias_info is not None and a.alias_info.is_write
    ]
    return [each for each in tree_leaves(written) if isinstance(each, Tensor)]
