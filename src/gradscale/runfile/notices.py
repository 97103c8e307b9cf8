"""What the writer says to whoever trains, and when the interpreter ends."""

import atexit
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from gradscale.errors import GradscaleWarning

_ROOM = os.path.dirname(__file__)


def behind(path: Path | None, backlog: int) -> GradscaleWarning:
    """Return the notice that rows are dropped."""
    return GradscaleWarning(
        f"{backlog} rows wait to be written to {path}, and further ones are dropped "
        "until there is room. The disk does not keep up, so the record has gaps. "
        "Write it to a local disk.",
        code="GS309",
    )


def stopped(path: Path | None, why: str) -> GradscaleWarning:
    """Return the notice that nothing more is recorded."""
    return GradscaleWarning(
        f"Recording to {path} has stopped: {why}. What was written before is kept; the "
        "training is not affected. See that the file's folder is there, has space and "
        "may be written to.",
        code="GS308",
    )


def forked(path: Path | None) -> GradscaleWarning:
    """Return the notice that a forked process does not record."""
    return GradscaleWarning(
        f"Recording to {path} has stopped in process {os.getpid()}, which was forked "
        "from the one that records. Two processes cannot write one run file. Record "
        "in the process that trains, or make a RunWriter here.",
        code="GS308",
    )


def say(notice: GradscaleWarning) -> None:
    """Warn at the line that called into this room."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back and os.path.dirname(frame.f_code.co_filename) == _ROOM:
        level, frame = level + 1, frame.f_back
    warnings.warn(notice, stacklevel=level)


class AtEnd:
    """A call at the end of the process that can be taken back."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        atexit.register(call)
        # Forked children of multiprocessing leave without atexit.
        module = sys.modules.get("multiprocessing.util")
        self._other = module and module.Finalize(None, call, exitpriority=0)

    def cancel(self) -> None:
        """Take it back."""
        atexit.unregister(self._call)
        if self._other is not None:
            self._other.cancel()
