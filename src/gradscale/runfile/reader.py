"""Reads a run file, also while it is written. Leaves no file behind."""

import math
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gradscale.errors import OrderError
from gradscale.runfile.column_checks import (
    EVENTS,
    NEWEST,
    PEAKS,
    SAMPLES,
    STEPS,
    TENSORS,
    Table,
    meta_of,
    step_number,
)
from gradscale.runfile.opening import (
    MOST_INSTRUCTIONS,
    Opened,
    busy,
    open_readonly,
    stat_of,
)
from gradscale.runfile.rows import EventRow, SampleRow, StepRow, TensorSample
from gradscale.runfile.schema import damaged, is_locked, steps_in

# Rows read at a time. The file is unlocked between two reads, so that a slow reader
# neither blocks the writer nor makes its log grow.
CHUNK = 10_000

T = TypeVar("T")


class Run:
    """A run file, open for reading.

    Every accessor shows the rows committed when it is called. Use it in the thread
    that opened it, and close it, or use it in a `with` block.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closed = False
        self._opened: Opened | None = None
        # An unreadable file is refused here and not at the first accessor.
        self._using(lambda connection: None)

    @property
    def meta(self) -> dict[str, Any]:
        """All entries of `meta`."""
        query = "SELECT key, value FROM meta ORDER BY key"
        return self._using(lambda file: meta_of(file.execute(query)))

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that have peaks or samples, in order of arrival."""
        rows = self._all(TENSORS, "SELECT id, name FROM tensors ORDER BY id")
        return tuple(name for _, name in rows)

    @property
    def last_step(self) -> int:
        """The newest step in the file; 0 if there is none."""
        rows = self._all(NEWEST, "SELECT max(step) FROM steps WHERE step > 0")
        return rows[0][0] or 0

    def steps(self, after_step: int = 0) -> Iterator[StepRow]:
        """Yield the rows of all steps above `after_step`, ascending."""
        query = "SELECT * FROM steps WHERE step > ? ORDER BY step LIMIT ?"
        while chunk := self._all(STEPS, query, after_step, CHUNK, after=after_step):
            yield from map(StepRow._make, chunk)
            after_step = chunk[-1][0]

    def tail(self, after_step: int) -> list[StepRow]:
        """Return the present rows of steps above `after_step`."""
        return list(self.steps(after_step))

    def events(self, after_id: int = 0) -> Iterator[EventRow]:
        """Yield all events with an id above `after_id`, in order of arrival."""
        query = "SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?"
        while chunk := self._all(EVENTS, query, after_id, CHUNK, after=after_id):
            yield from map(EventRow._make, chunk)
            after_id = chunk[-1][0]

    def peak_steps(self) -> list[int]:
        """Return the steps that have peaks, ascending."""
        return self._steps_in("peaks")

    def peaks(self, step: int) -> dict[str, float]:
        """Return the peak of each tensor in one step; empty if none were kept."""
        rows = self._all(
            PEAKS,
            "SELECT tensor, name, peak FROM peaks JOIN tensors ON id = tensor "
            "WHERE step = ? ORDER BY tensor",
            step,
        )
        return {name: peak for _, name, peak in rows}

    def sampled_steps(self) -> list[int]:
        """Return the steps that have samples, ascending."""
        return self._steps_in("samples")

    def samples(self, step: int | None = None) -> Iterator[SampleRow]:
        """Yield the counts of the underflow meter, of one step or of all."""
        query = (
            "SELECT tensor, name, total, zeros, subnormals, histogram, below, above, "
            "nonfinite FROM samples JOIN tensors ON id = tensor WHERE step = ? "
            "ORDER BY tensor"
        )
        for sampled in self.sampled_steps() if step is None else [step]:
            for _, name, *counts in self._all(SAMPLES, query, sampled):
                yield SampleRow(sampled, name, TensorSample(*counts))

    def check(self) -> None:
        """Read the whole file and raise StateError if SQLite finds damage."""
        # Visits every page once: its length depends on the file alone.
        found = self._using(
            lambda file: [text for (text,) in file.execute("PRAGMA integrity_check")],
            instructions=math.inf,
        )
        if found != ["ok"]:
            raise damaged(self.path, ValueError("; ".join(found[:3])))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._closed = True
        self._close_connection()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(
        self, table: Table, query: str, *values: int, after: int | None = None
    ) -> list[list[Any]]:
        """Return the checked rows of a query whose first column is above `after`."""
        return self._using(
            lambda file: list(table.rows(file.execute(query, values), after))
        )

    def _steps_in(self, table: str) -> list[int]:
        keys = Table(table, {"step": step_number})
        return self._using(
            lambda file: [
                step for (step,) in keys.rows((s,) for s in steps_in(file, table))
            ]
        )

    def _using(
        self,
        read: Callable[[sqlite3.Connection], T],
        *,
        instructions: float = MOST_INSTRUCTIONS,
    ) -> T:
        """Call a function with the open file; convert all errors of the file."""
        if self._closed:
            raise OrderError(
                f"{self.path} was closed before it was read. A closed run file cannot "
                "be read. Read it before close() or inside the with block.",
                code="GS102",
            )
        if self._opened is not None and self._opened.copied != stat_of(self.path):
            # A writer has opened the file since it was copied.
            self._close_connection()
        if self._opened is None:
            self._opened = open_readonly(self.path)
        opened = self._opened
        opened.budget.left = instructions
        try:
            return read(opened.connection)
        except sqlite3.ProgrammingError:
            # Called from another thread: a usage error, not one of the file.
            raise
        except (sqlite3.Error, ValueError, MemoryError) as error:
            if opened.budget.left < 0:
                endless = ValueError("a table has no end")
                raise damaged(self.path, endless) from error
            if isinstance(error, sqlite3.Error) and is_locked(error):
                raise busy(self.path) from error
            raise damaged(self.path, error) from error
        finally:
            if opened.folder is None:
                self._close_connection()

    def _close_connection(self) -> None:
        if self._opened is not None:
            self._opened.connection.close()
            if self._opened.folder is not None:
                self._opened.folder.cleanup()
            self._opened = None


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run file for reading; nothing is written, not even beside it.

    The file may be in use by a training process, left by a killed one, or on a
    read-only disk.

    >>> open_run("nowhere.gs")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    gradscale.errors.StateError: There is no file nowhere.gs...

    Raises:
        StateError: It is not a run file or damaged (GS306), or was written by a newer
            version (GS307).
    """
    return Run(Path(path))
