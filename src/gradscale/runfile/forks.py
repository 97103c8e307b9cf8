"""Nothing of a writer is used across a fork.

SQLite forbids to carry an open file into a forked process, even to close it there: a
rollback there would undo what the parent is writing. So a fork waits until no
transaction is open, and in the child every writer is made inert. The child's copy of
the connection is never closed: the frame of the thread that held it is never left.
"""

import os
import sys
import threading
from typing import Protocol
from weakref import WeakSet

# A disk that hangs must not keep a process from forking for good.
LONGEST_WAIT = 5.0


class Forkable(Protocol):
    """What a fork has to know of a writer."""

    def hold(self, seconds: float) -> bool:
        """Keep transactions from beginning; False if one would not end."""

    def release(self) -> None:
        """Let transactions begin again, in the process that held them."""

    def become_inert(self) -> None:
        """Record nothing more: this is another process."""


_writers: WeakSet[Forkable] = WeakSet()
_held = threading.local()


def watch(writer: Forkable) -> None:
    """Make a writer safe against forks from now on."""
    _writers.add(writer)


def forget(writer: Forkable) -> None:
    """Stop looking after a writer that has ended."""
    _writers.discard(writer)


def _before() -> None:
    _held.writers = [writer for writer in _writers if writer.hold(LONGEST_WAIT)]


def _after_in_parent() -> None:
    for writer in _held.writers:
        writer.release()
    _held.writers = []


def _after_in_child() -> None:
    for writer in list(_writers):
        writer.become_inert()
    _writers.clear()
    _held.writers = []


if sys.platform != "win32":
    os.register_at_fork(
        before=_before,
        after_in_parent=_after_in_parent,
        after_in_child=_after_in_child,
    )
