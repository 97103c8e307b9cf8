"""The reader of a run file, also while it is written. Leaves no file behind."""

import json
import math
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gradscale.errors import OrderError, StateError
from gradscale.runfile.rows import (
    NAN,
    EventRow,
    SampleRow,
    StepRow,
    TensorSample,
    restored,
    unpacked,
)
from gradscale.runfile.schema import (
    damaged,
    is_locked,
    read_meta,
    refuse_foreign,
    steps_in,
)

# Rows read at a time. The file is unlocked between two reads, so that a slow reader
# neither blocks the writer nor makes its log grow.
CHUNK = 10_000
# A commit takes milliseconds; on a busy network file system, seconds.
BUSY_SECONDS = 10.0
# The offset of the write version in SQLite's header, and its value for WAL.
_WRITE_VERSION = 18
_WAL = 2

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
        self._opened: _Opened | None = None
        # An unreadable file is refused here and not at the first accessor.
        self._using(lambda connection: None)

    @property
    def meta(self) -> dict[str, Any]:
        """All entries of `meta`."""
        return self._using(read_meta)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors that have peaks or samples, in order of arrival."""
        return tuple(
            name for (name,) in self._all("SELECT name FROM tensors ORDER BY id")
        )

    @property
    def last_step(self) -> int:
        """The newest step in the file; 0 if there is none."""
        [(last,)] = self._all("SELECT max(step) FROM steps")
        return last or 0

    def steps(self, after_step: int = 0) -> Iterator[StepRow]:
        """Yield the rows of all steps above `after_step`, ascending."""
        query = "SELECT * FROM steps WHERE step > ? ORDER BY step LIMIT ?"
        while chunk := self._all(query, after_step, CHUNK):
            for values in chunk:
                row = _step_row(values)
                yield row
            after_step = row.step

    def tail(self, after_step: int) -> list[StepRow]:
        """Return the present rows of steps above `after_step`."""
        return list(self.steps(after_step))

    def events(self, after_id: int = 0) -> Iterator[EventRow]:
        """Yield all events with an id above `after_id`, in order of arrival."""
        query = "SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?"
        while chunk := self._all(query, after_id, CHUNK):
            for values in chunk:
                row = EventRow(*values)
                yield row._replace(data=json.loads(row.data))
            after_id = row.id

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
        """Yield the counts of the underflow meter, of one step or of all."""
        query = (
            "SELECT step, name, total, zeros, subnormals, histogram, below, above, "
            "nonfinite FROM samples JOIN tensors ON id = tensor WHERE step = ? "
            "ORDER BY tensor"
        )
        for sampled in self.sampled_steps() if step is None else [step]:
            for at, name, total, zeros, low, blob, *beyond in self._all(query, sampled):
                sample = TensorSample(total, zeros, low, unpacked(blob), *beyond)
                yield SampleRow(at, name, sample)

    def check(self) -> None:
        """Read the whole file and raise StateError if SQLite finds damage."""
        found = [text for (text,) in self._all("PRAGMA integrity_check")]
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

    def _all(self, query: str, *values: object) -> list[Any]:
        return self._using(lambda file: file.execute(query, values).fetchall())

    def _using(self, read: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise OrderError(
                f"{self.path} was closed before it was read. A closed run file cannot "
                "be read. Read it before close() or inside the with block.",
                code="GS102",
            )
        if self._opened is not None and self._opened.copied != _stat_of(self.path):
            # A writer has opened the file since it was copied.
            self._close_connection()
        if self._opened is None:
            self._opened = _open_readonly(self.path)
        try:
            return read(self._opened.connection)
        except sqlite3.ProgrammingError:
            # Called from another thread: an error of the caller, not of the file.
            raise
        except (sqlite3.DatabaseError, ValueError) as error:
            raise damaged(self.path, error) from error
        finally:
            if self._opened.folder is None:
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


def _step_row(values: tuple[Any, ...]) -> StepRow:
    # SQLite has no bool, and a NaN is stored as a string.
    row = StepRow._make(values)
    return StepRow(
        row.step,
        row.time,
        row.scale,
        bool(row.applied),
        row.verdict,
        _number(row.norm),
        _number(row.amax),
        _number(row.loss),
    )


def _number(value: Any) -> float | None:
    return math.nan if value == NAN else value


class _Opened(NamedTuple):
    """A run file open for reading.

    Attributes:
        connection: Reads it.
        folder: The folder of the temporary copy that is read; None if the file itself
            is open. Then it is closed after every read: an open connection would keep
            a writer from merging its log at the end.
        copied: `_stat_of` the file before it was copied.
    """

    connection: sqlite3.Connection
    folder: tempfile.TemporaryDirectory[str] | None
    copied: tuple[object, ...] = ()


class _NeedsCopy(Exception):
    """SQLite would write beside the file before it reads."""


def _open_readonly(path: Path) -> _Opened:
    """Open a run file, or a temporary copy where SQLite would write before it reads.

    Raises:
        StateError: It is not a run file, too new, or damaged.
    """
    if not path.is_file():
        raise StateError(
            f"There is no file {path}. Nothing can be read from it. Pass the name "
            "given with record= or after gradscale run -o.",
            code="GS306",
        )
    try:
        return _open_in_place(path)
    except _NeedsCopy:
        pass
    except sqlite3.OperationalError as error:
        if is_locked(error):
            raise _busy(path) from error
    except sqlite3.DatabaseError as error:
        raise damaged(path, error) from error
    return _open_copy(path)


def _busy(path: Path) -> StateError:
    return StateError(
        f"{path} was locked for {BUSY_SECONDS:g} s. Another process holds it in the "
        "middle of a change, so it cannot be read now. Try again; if the lock stays, "
        "end the process that has the file open.",
        code="GS306",
    )


def _open_in_place(path: Path) -> _Opened:
    how = "mode=ro"
    if _is_wal(path):
        if not _beside(path, "-wal").exists():
            # No log, so no writer. Without this, SQLite would create a log and leave
            # it behind.
            how = "immutable=1"
        elif not _beside(path, "-shm").exists():
            # A log that no process has open: a copied or moved file.
            raise _NeedsCopy
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_SECONDS,
    )
    return _Opened(_checked(connection, path), None)


def _checked(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    try:
        refuse_foreign(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_copy(path: Path) -> _Opened:
    """Open a copy of a file for writing: SQLite recovers it first."""
    copied = _stat_of(path)
    folder = tempfile.TemporaryDirectory(prefix="gradscale-")
    copy = Path(folder.name) / path.name
    try:
        for ending in ("", "-wal", "-journal"):
            source = _beside(path, ending)
            if source.exists():
                shutil.copyfile(source, _beside(copy, ending))
        connection = sqlite3.connect(copy, isolation_level=None)
        return _Opened(_checked(connection, path), folder, copied)
    except (OSError, sqlite3.DatabaseError) as error:
        folder.cleanup()
        raise damaged(path, error) from error
    except BaseException:
        folder.cleanup()
        raise


def _is_wal(path: Path) -> bool:
    with path.open("rb") as file:
        header = file.read(_WRITE_VERSION + 1)
    return len(header) > _WRITE_VERSION and header[_WRITE_VERSION] == _WAL


def _stat_of(path: Path) -> tuple[object, ...]:
    """Return size and mtime of the file and its side files; changes when written."""
    found = []
    for ending in ("", "-wal", "-shm", "-journal"):
        try:
            status = _beside(path, ending).stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            # Missing or not readable: opening it raises the error.
            found.append((-1, -1))
    return tuple(found)


def _beside(path: Path, ending: str) -> Path:
    """Return the path of a file that SQLite keeps beside another."""
    return path.with_name(path.name + ending)
