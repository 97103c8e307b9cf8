"""Hooks at a fork and at the end of the process.

SQLite forbids carrying an open connection into a forked process, even to close it
there: a rollback in the child would undo the parent's transaction. A fork therefore
waits until no transaction is open, and in the child every writer is disabled. The
child's copy of the connection is never closed, because the stack frame of the thread
that holds it is never left.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

# A disk that hangs must not block a fork for good.
LONGEST_WAIT = 5.0


class Forkable(Protocol):
    """The methods of a writer that the fork hooks call."""

    def hold(self, seconds: float) -> bool:
        """Block new transactions; False if the open one did not end in time."""

    def release(self) -> None:
        """Allow transactions again, in the process that blocked them."""

    def disable(self) -> None:
        """Stop recording: this is the forked process."""


_writers: WeakSet[Forkable] = WeakSet()
_held = threading.local()


def watch_forks(writer: Forkable) -> None:
    """Call the writer's methods around every fork from now on."""
    _writers.add(writer)


def ignore_forks(writer: Forkable) -> None:
    """Undo `watch_forks`, for a writer that is closed."""
    _writers.discard(writer)


def _before() -> None:
    _held.writers = [writer for writer in _writers if writer.hold(LONGEST_WAIT)]


def _after_in_parent() -> None:
    for writer in _held.writers:
        writer.release()
    _held.writers = []


def _after_in_child() -> None:
    for writer in list(_writers):
        writer.disable()
    _writers.clear()
    _held.writers = []


if sys.platform != "win32":
    os.register_at_fork(
        before=_before,
        after_in_parent=_after_in_parent,
        after_in_child=_after_in_child,
    )


class AtExit:
    """A call at the end of the process that can be cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        atexit.register(call)
        # Forked children of multiprocessing exit without running atexit.
        module = sys.modules.get("multiprocessing.util")
        self._finalizer = module and module.Finalize(None, call, exitpriority=0)

    def cancel(self) -> None:
        """Unregister the call."""
        atexit.unregister(self._call)
        if self._finalizer is not None:
            self._finalizer.cancel()
