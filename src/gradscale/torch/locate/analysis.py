"""Selects the first operation or module that produced a non-finite value. Pure.

Shared by the replay, which observes every operation, and by the module hooks, which
observe module inputs, module outputs and gradients.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from gradscale.judge.unsafe_ops import Evidence, Maker, Range, recognise
from gradscale.torch.locate.module_tracker import NO_MODULE, ModuleName
from gradscale.torch.locate.result import LOSSES, Location
from gradscale.torch.locate.tensor_stats import TensorStats

# How many operations back the inputs of an operation are followed for its evidence.
MAX_DEPTH = 4
# The reciprocal of a divisor outside any module, as far as it is infinite.
DIVISOR = "1 / divisor"
# The largest float16.
LARGEST_HALF = 65504.0


@dataclass(eq=False)
class Operation:
    """One operation of a forward pass.

    Attributes:
        name: Without prefix and overload; "" if only the module is known.
        module: The module it ran in.
        inputs: Statistics of its input tensors, as far as they are known.
        constants: The numeric constants of the call.
        producers: The operations that computed its inputs, where known.
        line: The user's file and line, where known.
        is_view: It computes nothing: a view or a copy.
    """

    name: str
    module: ModuleName
    inputs: list[TensorStats] = field(default_factory=list)
    constants: tuple[float, ...] = ()
    producers: list["Operation"] = field(default_factory=list)
    line: str | None = None
    is_view: bool = False

    @property
    def peak(self) -> float:
        """The largest finite magnitude among its inputs."""
        return max((each.peak for each in self.inputs), default=0.0)

    def __str__(self) -> str:
        """Return name and module for a message."""
        if self.module == NO_MODULE:
            return self.name
        return f"{self.name} of {self.module}"


@dataclass(eq=False)
class Origin:
    """A non-finite value that no earlier observed value explains.

    Attributes:
        order: Position among all observations of the iteration.
        direction: "forward" or "backward".
        operation: The operation that produced it; in backward, the one whose gradient
            it is.
        tensor: As in `Location`.
        stats: Of the tensor.
        peak: The largest finite magnitude among the inputs of the operation; in
            backward these are gradients and saved values.
        sources: Origins among its inputs: a NaN may come from an inf.
        is_mask: An infinity that the user wrote, such as a mask.
        in_node: Produced by an autograd node, not by a sum between two nodes.
        context: As in `Location`.
    """

    order: int
    direction: str
    operation: Operation
    tensor: str
    stats: TensorStats
    peak: float = 0.0
    sources: list["Origin"] = field(default_factory=list)
    is_mask: bool = False
    in_node: bool = True
    context: str = ""

    @property
    def kind(self) -> str:
        """Return "nan" or "inf"."""
        return self.stats.kind

    @property
    def is_given(self) -> bool:
        """Whether the value was an input or a parameter, not computed."""
        return self.tensor == "input" or self.tensor.startswith("parameter ")

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Location` that describe the origin."""
        operation, stats = self.operation, self.stats
        dtype = str(stats.dtype).removeprefix("torch.")
        pattern = None
        if operation.name and not (self.is_mask or self.is_given):
            evidence = Evidence(
                operation=operation.name,
                direction=self.direction,
                kind=self.kind,
                dtype=dtype,
                inputs=tuple(Range(each.low, each.high) for each in operation.inputs),
                constants=operation.constants,
                makers=tuple(_producers_of(operation)),
                inf_before=any(each.inf for each in operation.inputs),
                module=operation.module.class_name,
            )
            pattern = recognise(evidence)
        return {
            "found": True,
            "direction": self.direction,
            "module": operation.module.name,
            "module_class": operation.module.class_name,
            "operation": operation.name,
            "tensor": self.tensor,
            "kind": self.kind,
            "count": stats.nan or stats.inf,
            "elements": stats.elements,
            "dtype": dtype,
            "peak": self.peak,
            "was_float16": 0 < stats.inf < stats.elements and not stats.wide,
            "line": operation.line,
            "context": self.context,
            "pattern": pattern,
        }


def first_origin(origins: Iterable[Origin]) -> Origin | None:
    """Return the earliest origin; None without any.

    Masks count only if nothing else is non-finite, and a loss only if no module is.
    """
    return min(
        origins,
        key=lambda each: (each.is_mask, each.tensor in LOSSES, each.order),
        default=None,
    )


def _producers_of(operation: Operation) -> list[Maker]:
    """Return the operations before an operation, the nearest first."""
    makers: list[Maker] = []
    visited: set[int] = set()
    layer = operation.producers
    for _ in range(MAX_DEPTH):
        layer = [each for each in map(_base, layer) if id(each) not in visited]
        visited |= {id(each) for each in layer}
        makers += [Maker(each.name, each.constants) for each in layer]
        layer = [producer for each in layer for producer in each.producers]
    return makers


def _base(operation: Operation) -> Operation:
    """Return the operation that computed the values of a view."""
    while operation.is_view and operation.producers:
        operation = operation.producers[0]
    return operation


class Observation(NamedTuple):
    """One tensor that the module hooks measured.

    Attributes:
        tensor: "input" or "output" of a module, `DIVISOR`, "target", "difference" from
            a target, "loss", "scaled loss", "grad_input", "grad_output" or "gradient of
            NAME".
        module: The module it belongs to.
        caller: For an input, the module that called `module`.
        stats: Index of its statistics.
        node: Index of the graph node; -1 in forward.
        given: An input that no module has computed.
    """

    tensor: str
    module: ModuleName
    caller: ModuleName
    stats: int
    node: int = -1
    given: bool = False


class GraphNode(NamedTuple):
    """One node of the autograd graph.

    Attributes:
        operation: The operation whose gradient it computes.
        leaves: For each gradient, the name of the parameter it belongs to, or None.
    """

    operation: Operation
    leaves: list[str | None]


def locate(
    observations: list[Observation],
    nodes: list[GraphNode],
    stats: list[TensorStats],
    scale: float,
) -> Location:
    """Return the location of the first non-finite value that the hooks observed.

    Args:
        observations: In the order in which they were made.
        nodes: The autograd graph.
        stats: Statistics of the observed tensors.
        scale: The scale that multiplied the loss.
    """
    # A NaN of a difference is one of the target; an infinity may be an overflow.
    observations = [
        each._replace(tensor="target") if each.tensor == "difference" else each
        for each in observations
        if each.tensor != "difference" or stats[each.stats].nan
    ]
    forward = [each for each in observations if each.node < 0]
    losses = [each for each in forward if each.tensor in LOSSES]
    plain = [each for each in losses if each.tensor == "loss"]
    location = partial(
        Location,
        instrument="hooks",
        scale=scale,
        loss_finite=all(stats[e.stats].finite for e in plain) if plain else None,
        forward_peak=max((stats[e.stats].peak for e in forward), default=0.0),
    )
    bad_losses = [e for e in losses if not stats[e.stats].finite]
    nan_loss = any(stats[each.stats].nan for each in bad_losses)
    bad = [i for i, e in enumerate(observations) if not stats[e.stats].finite]
    in_forward = [i for i in bad if observations[i].node < 0]
    if not bad_losses:
        in_forward = [
            i for i in in_forward if _is_hidden(observations[i], forward, stats)
        ]
    inputs = Counter(each.module for each in forward if each.tensor == "input")
    first = first_origin(
        _origin_of(
            i,
            each,
            nodes,
            stats[each.stats],
            # A mask comes along with data.
            masked=nan_loss and not (each.given and inputs[each.module] == 1),
        )
        for i in in_forward or (i for i in bad if observations[i].node >= 0)
        for each in [observations[i]]
    )
    if first is None:
        return location(found=False)
    observed = observations[first.order]
    if first.direction == "backward":
        first.peak = _gradient_peak(observed.node, observations, nodes, stats)
    else:
        first.peak = _input_peak(observed, forward, stats)
    given = first.tensor == "input" and observed.given
    peaks = (stats[each.stats].peak for each in forward if each.given)
    return location(**first.fields(), given=given, given_peak=max(peaks, default=0.0))


def _is_hidden(
    observed: Observation, forward: list[Observation], stats: list[TensorStats]
) -> bool:
    """Return whether a non-finite value explains the gradients of a finite loss.

    A saturating function hides an infinity from the loss, and a mask a NaN of the
    target, but not from its derivative. A mask itself is infinite without harm.
    """
    own = stats[observed.stats]
    if observed.tensor == "input":
        return observed.given and bool(own.nan or own.pos_inf)
    if observed.tensor == "output":
        return _input_peak(observed, forward, stats) > LARGEST_HALF
    return observed.tensor == "target" and own.nan > 0


def _origin_of(
    order: int,
    observed: Observation,
    nodes: list[GraphNode],
    stats: TensorStats,
    *,
    masked: bool,
) -> Origin:
    """Return a non-finite observation as an origin.

    Args:
        order: Its position.
        observed: The observation.
        nodes: The autograd graph.
        stats: Of the tensor.
        masked: An input whose only non-finite value is -inf is a mask.
    """
    if observed.node >= 0:
        operation = nodes[observed.node].operation
        return Origin(order, "backward", operation, observed.tensor, stats)
    module, tensor, context = observed.module, observed.tensor, ""
    if tensor == "input" and observed.caller != NO_MODULE:
        # The outputs of all modules are observed: a function of the caller made it.
        module, tensor = observed.caller, "output"
        context = f"between its modules, before {observed.module}"
    elif tensor in LOSSES:
        context = "computed after the last module, or in the product with the scale"
    is_mask = masked and observed.tensor == "input" and not (stats.nan or stats.pos_inf)
    operation = Operation("", module)
    if tensor == DIVISOR:
        operation = Operation("div", module, [stats._replace(low=0.0, high=0.0)])
    return Origin(
        order, "forward", operation, tensor, stats, is_mask=is_mask, context=context
    )


def _input_peak(
    observed: Observation, forward: list[Observation], stats: list[TensorStats]
) -> float:
    """Return the largest finite magnitude among a module's inputs.

    Inputs from outside of all modules are included. For a module without observed
    inputs, return the magnitude of the last tensor before it.
    """
    given = observed.tensor == "input" and observed.caller == NO_MODULE
    before = [each for each in forward if each.stats < observed.stats + given]
    inputs = [
        each
        for each in before
        if each.module == observed.module and each.tensor == "input"
    ]
    return max((stats[e.stats].peak for e in inputs or before[-1:]), default=0.0)


def _gradient_peak(
    node: int,
    observations: list[Observation],
    nodes: list[GraphNode],
    stats: list[TensorStats],
) -> float:
    """Return the largest finite magnitude among the gradients that enter a node.

    Gradients of views are not observed; those that enter the view are.
    """
    visited: set[int] = set()
    stack = [node]
    peak = 0.0
    while stack:
        operation = nodes[stack.pop()].operation
        feeding = {
            i for i, each in enumerate(nodes) if operation in each.operation.producers
        }
        for feeder in feeding - visited:
            visited.add(feeder)
            own = [stats[e.stats].peak for e in observations if e.node == feeder]
            peak = max([peak, *own])
            stack += [] if own else [feeder]
    return peak
