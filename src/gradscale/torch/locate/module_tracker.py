"""Tracks the running module and the module that created each autograd node."""

import bisect
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

# torch and gradscale.torch: their frames are never the user's line.
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# Sequence number of AccumulateGrad nodes: they belong to no module.
NO_SEQUENCE_NR = 2**64 - 1


class ModuleName(NamedTuple):
    """A module by name and class.

    Attributes:
        name: The dotted name from `named_modules()`, "" for the model itself; None
            outside the model, and where no module was running.
        class_name: The name of the module's class, "" where no module was running.
    """

    name: str | None
    class_name: str

    def __str__(self) -> str:
        """Return the name for a message.

        >>> str(ModuleName("decoder.3", "Block")), str(ModuleName("", "Net"))
        ('decoder.3 (Block)', 'the model itself (Net)')
        """
        if self.name is None:
            outside = f"{self.class_name} outside the model"
            return outside if self.class_name else "no module"
        suffix = f" ({self.class_name})" if self.class_name else ""
        return (self.name or "the model itself") + suffix


NO_MODULE = ModuleName(None, "")


class ModuleTracker:
    """Tracks the running modules, and those that created autograd nodes.

    Autograd numbers the nodes of a graph in the order of their creation. The numbers
    at which modules begin and end give the module of every node, also inside composite
    functions, for in-place operations and for outputs of any structure.
    """

    def __init__(self) -> None:
        self._running: list[ModuleName] = []
        # From sequence number `_starts[i]` on, nodes belong to `_modules[i]`.
        self._starts: list[int] = []
        self._modules: list[ModuleName] = []

    def clear(self) -> None:
        """Drop the node numbers of a graph that is no longer needed."""
        self._running, self._starts, self._modules = [], [], []

    @property
    def current(self) -> ModuleName:
        """The innermost running module."""
        return self._running[-1] if self._running else NO_MODULE

    def of_node(self, node: Any) -> ModuleName:
        """Return the module that was running when an autograd node was created."""
        number = node._sequence_nr()
        if number == NO_SEQUENCE_NR:
            return NO_MODULE
        index = bisect.bisect_right(self._starts, number) - 1
        return self._modules[index] if index >= 0 else NO_MODULE

    def enter(self, module: ModuleName) -> None:
        """Note that a module begins to run."""
        self._running.append(module)
        self._mark()

    def leave(self, module: ModuleName) -> None:
        """Note that a module, and those that it left open, no longer run."""
        if module in self._running:
            while self._running.pop() != module:
                pass
        self._mark()

    def _mark(self) -> None:
        number = next_sequence_nr()
        if self._starts and self._starts[-1] == number:
            self._modules[-1] = self.current
        elif not self._starts or number > self._starts[-1]:
            self._starts.append(number)
            self._modules.append(self.current)


def next_sequence_nr() -> int:
    """Return the sequence number of the next autograd node of this thread."""
    return torch._C._autograd._get_sequence_nr()


def in_backward() -> bool:
    """Return whether a backward pass is running: checkpointing runs modules in it."""
    return torch._C._current_graph_task_id() != -1


def caller_line() -> str | None:
    """Return file and line of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*LIBRARIES, "<")):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return None
