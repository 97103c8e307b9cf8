"""Values that stop being finite, and the operations in which they do."""

from dataclasses import dataclass, field

import torch

from gradscale.judge.unsafe_ops import Evidence, Maker, Range
from gradscale.torch.locate.module_tracker import Place
from gradscale.torch.locate.tensor_stats import Magnitude

# How far back an operation's inputs are followed for its evidence.
NEIGHBOURS = 4


@dataclass(eq=False)
class Operation:
    """One operation that ran.

    Attributes:
        name: Without prefix and overload.
        place: The module it ran in.
        inputs: What was in its tensors before it ran.
        constants: The numbers written in the call.
        makers: The operations that made its inputs, where known.
        line: The user's file and line, for the forward pass.
        moves_only: It computes nothing: a view or a copy.
    """

    name: str
    place: Place
    inputs: list[Magnitude]
    constants: tuple[float, ...]
    makers: list["Operation"]
    line: str | None = None
    moves_only: bool = False

    @property
    def peak(self) -> float:
        """The largest finite magnitude among its inputs."""
        return max((each.peak for each in self.inputs), default=0.0)


@dataclass(eq=False)
class Birth:
    """A value that is not finite and came from none that was.

    Attributes:
        order: When, among all births.
        kind: "inf" or "nan".
        direction: "forward" or "backward".
        operation: In which operation.
        seen: What was in its output.
        dtype: Of the output.
        tensor: "output", "grad_input", "grad_output", "gradient of NAME",
            "parameter NAME", "input" or "scaled loss".
        given: It was there before, or the call itself named an infinite constant.
        sources: Births among its inputs: a NaN may come from an inf.
        peak: The largest finite magnitude among the inputs of what made it; in
            backward these are gradients and saved values.
        node: It was made while a node of the graph ran, not between two of them.
    """

    order: int
    kind: str
    direction: str
    operation: Operation
    seen: Magnitude
    dtype: torch.dtype
    tensor: str
    given: bool = False
    sources: list["Birth"] = field(default_factory=list)
    peak: float = 0.0
    node: bool = True

    def evidence(self) -> Evidence:
        """Return what the patterns are recognised from."""
        return Evidence(
            operation=self.operation.name,
            direction=self.direction,
            kind=self.kind,
            dtype=str(self.dtype).removeprefix("torch."),
            inputs=tuple(Range(i.low, i.high) for i in self.operation.inputs),
            constants=self.operation.constants,
            makers=tuple(_neighbours(self.operation)),
            inf_before=any(each.inf for each in self.operation.inputs),
            module=self.operation.place.kind,
        )


def _neighbours(operation: Operation) -> list[Maker]:
    """Return the makers of an operation's inputs, the nearest first."""
    found: list[Maker] = []
    seen: set[int] = set()
    layer = operation.makers
    for _ in range(NEIGHBOURS):
        layer = [maker for maker in _computing(layer) if id(maker) not in seen]
        seen |= {id(maker) for maker in layer}
        found += [Maker(maker.name, maker.constants) for maker in layer]
        layer = [maker for each in layer for maker in each.makers]
    return found


def _computing(operations: list[Operation]) -> list[Operation]:
    """Return the operations, views and copies replaced by what they show."""
    found: list[Operation] = []
    for operation in operations:
        while operation.moves_only and operation.makers:
            operation = operation.makers[0]
        found.append(operation)
    return found
