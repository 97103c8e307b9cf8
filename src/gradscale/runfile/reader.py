"""The reader of a run file, also while it is written."""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from gradscale.errors import OrderError
from gradscale.runfile.opening import Opened, damaged, looks_of, open_readonly
from gradscale.runfile.rows import (
    EventRow,
    SampleRow,
    StepRow,
    TensorSample,
    restored,
    unpacked,
)
from gradscale.runfile.schema import read_meta, steps_in

# Rows read at a time. Between two such reads nothing is locked, so that a reader that
# takes its time neither stops the writer nor makes its log grow.
CHUNK = 10_000

T = TypeVar("T")


class Run:
    """A run file, open for reading.

    Every accessor shows what is committed when it is called. Use it in the thread
    that opened it, and close it, or use it in a `with` block.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closed = False
        self._opened: Opened | None = None
        # So that a file that cannot be read is refused here and not later.
        self._using(lambda connection: None)

    @property
    def meta(self) -> dict[str, Any]:
        """What is known of the run as a whole."""
        return self._using(read_meta)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that have peaks or samples, in order of arrival."""
        return tuple(
            name for (name,) in self._all("SELECT name FROM tensors ORDER BY id")
        )

    @property
    def last_step(self) -> int:
        """The newest step that is in the file; 0 if there is none."""
        [(last,)] = self._all("SELECT max(step) FROM steps")
        return last or 0

    def steps(self, after_step: int = 0) -> Iterator[StepRow]:
        """Yield the rows of all steps above `after_step`, ascending."""
        query = "SELECT * FROM steps WHERE step > ? ORDER BY step LIMIT ?"
        while chunk := self._all(query, after_step, CHUNK):
            for row in chunk:
                yield _step_row(row)
            after_step = chunk[-1][0]

    def tail(self, after_step: int) -> list[StepRow]:
        """Return the rows of steps above `after_step` that are there now."""
        return list(self.steps(after_step))

    def events(self, after_id: int = 0) -> Iterator[EventRow]:
        """Yield all events with an id above `after_id`, in order of arrival."""
        query = "SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?"
        while chunk := self._all(query, after_id, CHUNK):
            for number, step, time, code, where, data in chunk:
                yield EventRow(number, step, time, code, where, json.loads(data))
            after_id = chunk[-1][0]

    def peak_steps(self) -> list[int]:
        """Return the steps that have peaks, ascending."""
        return self._using(lambda file: steps_in(file, "peaks"))

    def peaks(self, step: int) -> dict[str, float]:
        """Return the peak of each tensor in one step; empty if none were kept."""
        rows = self._all(
            "SELECT name, peak FROM peaks JOIN tensors ON id = tensor WHERE step = ? "
            "ORDER BY tensor",
            step,
        )
        return {name: restored(peak) for name, peak in rows}

    def sampled_steps(self) -> list[int]:
        """Return the steps that have samples, ascending."""
        return self._using(lambda file: steps_in(file, "samples"))

    def samples(self, step: int | None = None) -> Iterator[SampleRow]:
        """Yield what the underflow meter counted, in one step or in all."""
        query = (
            "SELECT step, name, total, zeros, subnormals, histogram, below, above, "
            "nonfinite FROM samples JOIN tensors ON id = tensor WHERE step = ? "
            "ORDER BY tensor"
        )
        for sampled in self.sampled_steps() if step is None else [step]:
            for at, name, total, zeros, low, blob, *beyond in self._all(query, sampled):
                seen = TensorSample(total, zeros, low, unpacked(blob), *beyond)
                yield SampleRow(at, name, seen)

    def check(self) -> None:
        """Read the whole file and raise StateError if SQLite finds damage."""
        found = [text for (text,) in self._all("PRAGMA integrity_check")]
        if found != ["ok"]:
            raise damaged(self.path, ValueError("; ".join(found[:3])))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._closed = True
        self._let_go()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, query: str, *values: object) -> list[Any]:
        return self._using(lambda file: file.execute(query, values).fetchall())

    def _using(self, read: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise OrderError(
                f"{self.path} was closed before it was read. A closed run file shows "
                "nothing more. Read it before close() or inside the with block.",
                code="GS102",
            )
        if self._opened is not None and self._opened.copied != looks_of(self.path):
            # A writer that was about to begin, and has begun.
            self._let_go()
        if self._opened is None:
            self._opened = open_readonly(self.path)
        try:
            return read(self._opened.connection)
        except sqlite3.ProgrammingError:
            # Another thread: the caller's affair, not the file's.
            raise
        except (sqlite3.DatabaseError, ValueError) as error:
            raise damaged(self.path, error) from error
        finally:
            if self._opened.folder is None:
                self._let_go()

    def _let_go(self) -> None:
        if self._opened is not None:
            self._opened.connection.close()
            if self._opened.folder is not None:
                self._opened.folder.cleanup()
            self._opened = None


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run file for reading; nothing is written, not even beside it.

    It may be in use by the process that trains, left by one that was killed, or lie
    where nothing can be written.

    >>> open_run("nowhere.gs")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    gradscale.errors.StateError: There is no file nowhere.gs...

    Raises:
        StateError: It is not a run file or damaged (GS306), or was written by a newer
            version (GS307).
    """
    return Run(Path(path))


def _step_row(row: tuple[Any, ...]) -> StepRow:
    step, time, scale, applied, verdict, *numbers = row
    norm, amax, loss = (None if x is None else restored(x) for x in numbers)
    return StepRow(step, time, scale, bool(applied), verdict, norm, amax, loss)
