"""Seeing every operation of a forward and backward pass, and where values are lost."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscale.torch.locate.autograd_graph import operation_name, plain_name
from gradscale.torch.locate.births import Birth, Operation
from gradscale.torch.locate.module_tracker import (
    NOWHERE,
    Places,
    line_of_caller,
    next_number,
)
from gradscale.torch.locate.side_effects import WrittenWeights, place_of
from gradscale.torch.locate.tensor_stats import Magnitude, measured

# Memory that nobody has written to yet may hold anything.
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Replay(TorchDispatchMode):
    """Looks at the inputs and outputs of every operation while it is entered.

    It runs below autograd, so it sees what composite functions are made of, and the
    operations of backward too. Waits for the device at every operation.
    """

    # Operators that take functions are let through unseen.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, places: Places) -> None:
        super().__init__()
        self.births: list[Birth] = []
        self.forward_peak = 0.0
        self.node: Any = None
        self.backward = False
        # Set while the instruments themselves look at a tensor.
        self.paused = False
        self._places = places
        self._weights = WrittenWeights(model)
        named = [*model.named_parameters(), *model.named_buffers()]
        # By where it begins first: several may be parts of one piece of memory.
        self._names = {place_of(tensor): name for name, tensor in reversed(named)}
        self._begins = {_beginning(tensor): name for name, tensor in reversed(named)}
        # By address of memory: who wrote it last, and which births are in it.
        self._makers: dict[int, Operation] = {}
        self._lost: dict[int, list[Birth]] = {}
        # By the number of the node that autograd made for it.
        self._numbered: dict[int, Operation] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation and look at it."""
        kwargs = kwargs or {}
        if self.paused or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if any(_unfolds(kind) for kind in types):
            # A tensor made of others: its own parts are seen one by one.
            return NotImplemented
        given = tree_leaves((args, kwargs))
        tensors = [each for each in given if isinstance(each, Tensor)]
        before = [(t, place_of(t), measured(t)) for t in tensors if not t.is_meta]
        for tensor in _written(func, args, kwargs):
            self._weights.about_to_write(tensor)
        result = func(*args, **kwargs)
        name = plain_name(func._schema.name)
        if name == "mul" and len(args) > 1 and args[0] is args[1]:
            name = "square"
        if name not in UNWRITTEN:
            operation = self._operation(func, name, given, before)
            outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            for output in outputs:
                if not output.is_meta:
                    self._look(operation, before, output)
        return result

    def put_back_weights(self) -> None:
        """Undo what the pass wrote to weights."""
        self._weights.put_back()

    def births_in(self, tensors: Iterable[Tensor]) -> list[Birth]:
        """Return the births that what is not finite in these tensors comes from."""
        found: dict[int, Birth] = {}
        for tensor in tensors:
            seen = measured(tensor)
            if seen is not None and not seen.finite:
                for birth in self._lost.get(place_of(tensor), []):
                    found[birth.order] = birth
        return list(found.values())

    def operation_of(self, node: Any) -> Operation:
        """Return the forward operation that a node of the graph belongs to."""
        known = self._numbered.get(node._sequence_nr())
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        if known is not None and not own:
            return known
        # A function of the user's: the operations inside are not the whole of it.
        line = None if known is None else known.line
        place = self._places.of_node(node)
        return Operation(operation_name(node), place, [], (), [], line)

    def unseen(self, node: Any, tensor: Tensor, seen: Magnitude) -> None:
        """Note a gradient that a node made without any operation we know of."""
        place = place_of(tensor)
        if not self._lost.get(place):
            operation = self.operation_of(node)
            self._lost[place] = [self._born(operation, tensor, seen, "grad_input", [])]

    def _operation(
        self,
        func: Any,
        name: str,
        given: list[Any],
        before: list[tuple[Tensor, int, Magnitude | None]],
    ) -> Operation:
        seen = [magnitude for _, _, magnitude in before if magnitude is not None]
        makers = [
            self._makers[place] for _, place, _ in before if place in self._makers
        ]
        moves = bool(func.is_view) or name in {"detach", "clone", "alias", "expand"}
        constants = tuple(
            float(each)
            for each in given
            if isinstance(each, (int, float)) and not isinstance(each, bool)
        )
        if self._in_backward():
            place = self._places.of_node(self.node) if self.node else NOWHERE
            return Operation(name, place, seen, constants, makers, None, moves)
        here = self._places.here
        line = line_of_caller()
        operation = Operation(name, here, seen, constants, makers, line, moves)
        # The node was made before its operation was handed down to us. Operations
        # without a node come after it and find its number taken.
        self._numbered.setdefault(next_number() - 1, operation)
        return operation

    def _look(
        self,
        operation: Operation,
        before: list[tuple[Tensor, int, Magnitude | None]],
        output: Tensor,
    ) -> None:
        place = place_of(output)
        seen = measured(output)
        shared = any(place == other for _, other, _ in before)
        if not (operation.moves_only and shared):
            self._makers[place] = operation
        if seen is None or seen.finite:
            if not shared:
                self._lost.pop(place, None)
            if seen is not None and not self.backward:
                self.forward_peak = max(self.forward_peak, seen.peak)
            return
        sources = self._sources(operation, before)
        nan_before = any(m is not None and m.nan for _, _, m in before)
        inf_before = any(m is not None and m.inf for _, _, m in before)
        new_nan = seen.nan and not nan_before
        if new_nan or (seen.inf and not inf_before and not nan_before):
            tensor = "grad_input" if self._in_backward() else "output"
            birth = self._born(operation, output, seen, tensor, sources)
            named = any(abs(c) == float("inf") for c in operation.constants)
            birth.given = named and birth.kind == "inf"
            sources = [birth] if new_nan else [*sources, birth]
        self._lost[place] = sources

    def _sources(
        self,
        operation: Operation,
        before: list[tuple[Tensor, int, Magnitude | None]],
    ) -> list[Birth]:
        """Return the births among the inputs; what came from outside is one too."""
        found: dict[int, Birth] = {}
        for tensor, place, seen in before:
            if seen is None or seen.finite:
                continue
            if place not in self._lost:
                name = self._begins.get(_beginning(tensor), self._names.get(place))
                what = "input" if name is None else f"parameter {name}"
                birth = self._born(operation, tensor, seen, what, [])
                birth.given = True
                self._lost[place] = [birth]
            found |= {birth.order: birth for birth in self._lost[place]}
        return list(found.values())

    def _born(
        self,
        operation: Operation,
        output: Tensor,
        seen: Magnitude,
        tensor: str,
        sources: list[Birth],
    ) -> Birth:
        backward = self._in_backward() and not tensor.startswith(("input", "param"))
        # In backward the gradient of which forward operation is the question.
        shown = self.operation_of(self.node) if backward and self.node else operation
        birth = Birth(
            order=len(self.births),
            kind="nan" if seen.nan else "inf",
            direction="backward" if backward else "forward",
            operation=shown,
            seen=seen,
            dtype=output.dtype,
            tensor=tensor,
            sources=sources,
            peak=operation.peak,
            node=not backward or self.node is not None,
        )
        self.births.append(birth)
        return birth

    def _in_backward(self) -> bool:
        # Checkpointing runs parts of the forward pass again, with gradients enabled.
        return self.backward and not torch.is_grad_enabled()


def _beginning(tensor: Tensor) -> int:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.data_ptr() if strided else id(tensor)


def _unfolds(kind: type) -> bool:
    """Return whether a class of tensors is made of other tensors."""
    own = getattr(kind, "__torch_dispatch__", None)
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
