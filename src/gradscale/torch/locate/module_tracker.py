"""Which module is running, and in which one a node of the graph was made."""

import bisect
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from gradscale.torch.devices import host_may_act

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
# A gradient that is summed into a leaf has no place in the order of the forward pass.
NO_NUMBER = 2**64 - 1


class Place(NamedTuple):
    """A module by name.

    Attributes:
        name: As `named_modules()` has it, "" the model itself; None if the module is
            not part of the model, or no module was running.
        kind: The name of its class, "" if there is none.
    """

    name: str | None
    kind: str


NOWHERE = Place(None, "")


class Places:
    """Follows the modules of a model as they run.

    Autograd numbers the nodes of its graph as they are made. The numbers at which
    modules begin and end tell for every node in which module it was made, also for
    nodes inside composite functions, in-place operations and outputs of any shape.

    Hooks for all modules serve it, so no module's own list of hooks is touched.
    """

    def __init__(self, model: nn.Module | None) -> None:
        modules = () if model is None else model.named_modules()
        self._names = {id(module): name for name, module in modules}
        self._model = model
        self._running: list[tuple[int, Place]] = []
        self._numbers: list[int] = []
        self._at: list[Place] = []
        self._handles: list[RemovableHandle] = []

    def follow(self) -> None:
        """Begin to follow."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def leave(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running = []

    def forget(self) -> None:
        """Forget where nodes were made; the graph they belong to is gone."""
        self._running, self._numbers, self._at = [], [], []

    @property
    def here(self) -> Place:
        """The innermost module that is running."""
        return self._running[-1][1] if self._running else NOWHERE

    def of_module(self, module: nn.Module) -> Place:
        """Return the place of a module."""
        return Place(self._names.get(id(module)), type(module).__name__)

    def of_node(self, node: Any) -> Place:
        """Return the module in which a node of the graph was made."""
        number = node._sequence_nr()
        if number == NO_NUMBER:
            return NOWHERE
        index = bisect.bisect_right(self._numbers, number) - 1
        return self._at[index] if index >= 0 else NOWHERE

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if not host_may_act() or in_backward():
            return
        self._running.append((id(module), self.of_module(module)))
        self._mark()

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not host_may_act() or in_backward():
            return
        # What an exception has left open inside ends with it.
        if any(running == id(module) for running, _ in self._running):
            while self._running.pop()[0] != id(module):
                pass
        self._mark()

    def _mark(self) -> None:
        number = next_number()
        if self._numbers and self._numbers[-1] == number:
            self._at[-1] = self.here
        elif not self._numbers or number > self._numbers[-1]:
            self._numbers.append(number)
            self._at.append(self.here)


def next_number() -> int:
    """Return the number that autograd gives to the next node made by this thread."""
    return torch._C._autograd._get_sequence_nr()


def in_backward() -> bool:
    """Return whether a backward pass is under way: checkpointing runs modules there."""
    return torch._C._current_graph_task_id() != -1


def line_of_caller() -> str | None:
    """Return file and line of the innermost code that belongs to no library."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*LIBRARIES, "<")):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # the outermost has none
    return None
