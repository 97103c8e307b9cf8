"""Inserts rows into the tables of an open run file. Used by the writer's thread."""

import sqlite3
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradscale.runfile.rows import (
    NAN,
    StepRow,
    TensorSample,
    packed,
    storable,
    stored,
)
from gradscale.runfile.schema import read_meta, steps_in, write_meta
from gradscale.runfile.thinning import Thinning, due, limit

# sqlite3 releases the GIL once a statement and may wait 5 ms to get it back, so rows
# are inserted by the thousand. Before 3.32 a statement had at most 999 parameters.
PARAMETERS = 8000 if sqlite3.sqlite_version_info >= (3, 32) else 999
# Of each code the first events are kept, up to this number, and as many of the newest.
EVENTS_KEPT = 500
# Tables whose rows belong to steps.
OF_STEPS = ("steps", "peaks", "samples", "events")


class Event(NamedTuple):
    """An event to be written; `data` is JSON."""

    step: int | None
    time: float
    code: str
    where: str | None
    data: str


class Peaks(NamedTuple):
    """The peaks of a step, to be written."""

    step: int
    peaks: Mapping[str, float]


class Samples(NamedTuple):
    """The samples of a step, to be written."""

    step: int
    samples: Mapping[str, TensorSample]


class Meta(NamedTuple):
    """Entries of `meta`, to be written."""

    entries: dict[str, Any]


Detail = Event | Peaks | Samples | Meta


class Tables:
    """The tables of one open file. For one thread, inside its transactions.

    After an error the object is not usable: make a new one.

    Args:
        connection: Open for writing; the caller begins and commits transactions.
        every: The interval of sampled steps.
    """

    def __init__(self, connection: sqlite3.Connection, every: int) -> None:
        self._connection = connection
        self._every = every
        self._load()

    def _load(self) -> None:
        """Read the state that decides which rows are kept."""
        run = self._connection.execute
        [(last,)] = run("SELECT max(step) FROM steps").fetchall()
        self._last: int = last or 0
        self._ids: dict[str, int] = dict(run("SELECT name, id FROM tensors").fetchall())
        kept = {
            step
            for table in ("peaks", "samples")
            for step in steps_in(self._connection, table)
        }
        # Sampled steps and steps with an event do not displace one another.
        self._kept = {
            sampled: Thinning(
                step for step in kept if due(step, self._every) == sampled
            )
            for sampled in (True, False)
        }
        self._event = 0
        self._newest: defaultdict[str, deque[int]] = defaultdict(deque)
        self._firsts: defaultdict[str, int] = defaultdict(int)
        for number, code in run("SELECT id, code FROM events ORDER BY id").fetchall():
            self._event = number
            self._count_event(number, code)

    def add_steps(self, rows: Sequence[StepRow]) -> None:
        """Append rows. A step that is present already replaces all rows from it on."""
        start = 0
        for index, row in enumerate(rows):
            if row.step <= self._last:
                self._insert_steps(rows[start:index])
                self.cut(row.step)
                start = index
            self._last = row.step
        self._insert_steps(rows[start:])

    def _insert_steps(self, rows: Sequence[StepRow]) -> None:
        # `x == x` and no call: this runs for every value of every step.
        values = [value if value == value else NAN for row in rows for value in row]
        self._insert("steps", len(StepRow._fields), values)

    def add(self, detail: Detail) -> None:
        """Append an item that is not a step's row."""
        if isinstance(detail, Event):
            self._add_event(detail)
        elif isinstance(detail, Peaks):
            self._add_peaks(detail)
        elif isinstance(detail, Samples):
            self._add_samples(detail)
        else:
            write_meta(self._connection, detail.entries)

    def cut(self, step: int) -> None:
        """Delete a step and all rows after it: the run continues from before it."""
        for table in OF_STEPS:
            self._connection.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))
        self._load()

    def _add_event(self, event: Event) -> None:
        self._event += 1
        self._insert("events", 1 + len(event), [self._event, *event])
        dropped = self._count_event(self._event, event.code)
        if dropped is not None:
            self._connection.execute("DELETE FROM events WHERE id = ?", (dropped,))
            self._count_dropped(event.code)

    def _count_event(self, number: int, code: str) -> int | None:
        """Count an event of the file; return the id of the one to delete for it."""
        if self._firsts[code] < EVENTS_KEPT:
            self._firsts[code] += 1
            return None
        newest = self._newest[code]
        newest.append(number)
        return newest.popleft() if len(newest) > EVENTS_KEPT else None

    def _count_dropped(self, code: str) -> None:
        counts = read_meta(self._connection).get("events_dropped", {})
        counts[code] = counts.get(code, 0) + 1
        write_meta(self._connection, {"events_dropped": counts})

    def _add_peaks(self, detail: Peaks) -> None:
        ids = self._ids_of(detail.peaks)
        values: list[object] = []
        for tensor, peak in zip(ids, detail.peaks.values(), strict=True):
            values += (detail.step, tensor, stored(peak))
        self._insert("peaks", 3, values)
        self._thin(detail.step)

    def _add_samples(self, detail: Samples) -> None:
        ids = self._ids_of(detail.samples)
        values: list[object] = []
        for tensor, seen in zip(ids, detail.samples.values(), strict=True):
            values += (detail.step, tensor, seen.total, seen.zeros, seen.subnormals)
            values += (seen.below, seen.above, seen.nonfinite, packed(seen.histogram))
        self._insert("samples", 9, values)
        self._thin(detail.step)

    def _thin(self, step: int) -> None:
        """Drop the details of the steps that this one displaces."""
        kept = self._kept[due(step, self._every)]
        for dropped in kept.add(step, limit(len(self._ids))):
            for table in ("peaks", "samples"):
                self._connection.execute(
                    f"DELETE FROM {table} WHERE step = ?", (dropped,)
                )

    def _ids_of(self, names: Mapping[str, object]) -> list[int]:
        """Return the ids of tensors; unknown names get a new id."""
        texts = list(map(storable, names))
        for name in dict.fromkeys(texts):
            if name in self._ids:
                continue
            self._ids[name] = len(self._ids) + 1
            self._connection.execute(
                "INSERT INTO tensors VALUES (?, ?)", (self._ids[name], name)
            )
        return [self._ids[name] for name in texts]

    def _insert(self, table: str, columns: int, values: Sequence[object]) -> None:
        """Insert rows, given as one flat list of `columns` values each."""
        most = PARAMETERS // columns * columns
        for start in range(0, len(values), most):
            part = values[start : start + most]
            row = f"({','.join('?' * columns)})"
            rows = ",".join([row] * (len(part) // columns))
            self._connection.execute(
                f"INSERT OR REPLACE INTO {table} VALUES {rows}", part
            )
