"""The thread that commits."""

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from gradscale.runfile.filesystem import Journal
from gradscale.runfile.opening import is_locked
from gradscale.runfile.tables import Detail, Meta, Peaks, Samples, StepTuple, Tables

THREAD = "gradscale-record"
# Four commits a second: with a slow one in between, less than a second is at risk.
COMMIT_EVERY = 0.25
# A transaction has at most so many items, so that a fork never waits long for it.
BATCH = 20_000
# How long SQLite itself waits for a reader before the batch is tried again.
BUSY_SECONDS = 5.0
# What a reader that stays open can make the log grow to is cut back to this.
LOG_BYTES = 16 << 20


class Flush(threading.Event):
    """A mark in the queue, set when all before it is committed."""


class _Gone(Exception):
    """The file is no longer where it was."""


class Committer:
    """Takes what is in the queue and commits it, until it is told to finish.

    Args:
        path: The run file.
        journal: How SQLite journals.
        queue: What is handed over; rows of steps are plain tuples.
        every: The distance of sampled steps.
        settle: Called once from the thread with the reason, if it has to stop.

    Attributes:
        between: Held during a transaction.
        details: How many peaks and samples were taken from the queue.
        dropped, details_dropped: Counts of the writer, to be written into `meta`.
        ask: Called before each commit, to hand over what was held back.
    """

    def __init__(
        self,
        path: Path,
        journal: Journal,
        queue: deque[StepTuple | Detail | Flush],
        every: int,
        settle: Callable[[str], None],
    ) -> None:
        self._path = path
        self._journal = journal
        self._queue = queue
        self._every = every
        self._settle = settle
        self.between = threading.Lock()
        self.details = 0
        self.dropped = 0
        self.details_dropped = 0
        self.ask: Callable[[], None] | None = None
        self._told = (0, 0)
        self._tables: Tables | None = None
        self._wake = threading.Event()
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def hurry(self) -> None:
        """Commit now."""
        self._wake.set()

    def finish(self, timeout: float) -> None:
        """Commit what is there and end; wait for it."""
        self._finishing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if self._thread.is_alive():
            self._settle(f"the disk did not answer for {timeout:g} s")

    def _run(self) -> None:
        pending: list[StepTuple | Detail | Flush] = []
        # A local name on purpose: after a fork it keeps the connection from being
        # closed in the child.
        connection = None
        try:
            with self.between:
                connection = self._connect()
                self._place = _place(self._path)
            while True:
                finishing = self._finishing
                if self.ask is not None:
                    # A fork must not come while it holds a lock.
                    with self.between:
                        self.ask()
                pending = pending or self._take()
                with self.between:
                    self._look_for_file()
                    # False if another connection holds the file: the same rows again.
                    if not pending or self._commit(connection, pending):
                        _mark(pending)
                        pending = []
                if finishing and pending:
                    raise TimeoutError("another process holds the file")
                if finishing and not self._queue:
                    break
                if not finishing and len(self._queue) < BATCH:
                    self._wake.wait(COMMIT_EVERY)
                    self._wake.clear()
            with self.between:
                self._leave_one_file(connection)
                connection.close()
        except Exception as error:
            self._settle(f"{type(error).__name__}: {error}")
            _mark(pending)
            if connection is not None:
                with self.between:
                    connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            # rw: a file that was deleted must not be made again.
            f"{self._path.absolute().as_uri()}?mode=rw",
            uri=True,
            isolation_level=None,
            timeout=BUSY_SECONDS,
            # A statement for 1000 rows takes some hundred kilobytes.
            cached_statements=8,
        )
        run = connection.execute
        try:
            [(mode,)] = run(f"PRAGMA journal_mode = {self._journal}").fetchall()
        except sqlite3.OperationalError as error:
            if not is_locked(error):
                raise
            # A reader is in the way: the journal that the file has works too.
            [(mode,)] = run("PRAGMA journal_mode").fetchall()
        run(f"PRAGMA journal_size_limit = {LOG_BYTES}").fetchall()
        # Either survives a loss of power; with a log, NORMAL is enough for it.
        run(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        return connection

    def _take(self) -> list[StepTuple | Detail | Flush]:
        queue = self._queue
        return [queue.popleft() for _ in range(min(len(queue), BATCH))]

    def _look_for_file(self) -> None:
        """Raise if the file was deleted: SQLite would go on writing into nothing."""
        try:
            place = _place(self._path)
        except FileNotFoundError:
            raise _Gone("the file was deleted or moved") from None
        # Network file systems may number a file anew.
        if self._journal == "wal" and place != self._place:
            raise _Gone("another file was put in its place")

    def _commit(
        self, connection: sqlite3.Connection, items: list[StepTuple | Detail | Flush]
    ) -> bool:
        """Write items in one transaction; False if the file is locked."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            tables = self._tables or Tables(connection, self._every)
            # Until the commit is through, the file is not what it thinks.
            self._tables = None
            _write(tables, items)
            counts = (self.dropped, self.details_dropped)
            if counts != self._told:
                named = zip(("dropped", "details_dropped"), counts, strict=True)
                tables.add(Meta(dict(named)))
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if not is_locked(error):
                raise
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            return False
        self._told, self._tables = counts, tables
        self.details += sum(isinstance(item, (Peaks, Samples)) for item in items)
        return True

    def _leave_one_file(self, connection: sqlite3.Connection) -> None:
        """Put all into the one file, so that it can be copied and read anywhere."""
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            connection.execute("PRAGMA busy_timeout = 200")
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.OperationalError as error:
            # A reader has the file open: its log, now empty, stays.
            if not is_locked(error):
                raise


def _write(tables: Tables, items: list[StepTuple | Detail | Flush]) -> None:
    """Hand items to the tables; steps that follow one another go together."""
    rows: list[StepTuple] = []
    for item in items:
        if type(item) is tuple:
            rows.append(item)  # type: ignore[arg-type]  # the only plain tuples
        elif not isinstance(item, Flush):
            tables.add_steps(rows)
            rows = []
            tables.add(item)  # type: ignore[arg-type]  # not a plain tuple here
    tables.add_steps(rows)


def _mark(items: list[StepTuple | Detail | Flush]) -> None:
    for item in items:
        if isinstance(item, Flush):
            item.set()


def _place(path: Path) -> tuple[int, int]:
    seen = os.stat(path)
    return seen.st_dev, seen.st_ino
