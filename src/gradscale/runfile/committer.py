"""The thread that commits queued rows to a run file."""

import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from gradscale.runfile.creation import Continued, Journal, keep_copy
from gradscale.runfile.inserts import Detail, Meta, Peaks, Samples, Tables
from gradscale.runfile.rows import StepRow
from gradscale.runfile.schema import is_locked, read_meta

THREAD = "gradscale-record"
# Four commits a second: with a slow one in between, less than a second is at risk.
COMMIT_EVERY = 0.25
# The most items of a transaction: a fork waits for the end of it.
BATCH = 20_000
# Seconds that SQLite waits for a reader before the batch is tried again.
BUSY_SECONDS = 5.0
# The log grows while a reader stays open, and is then cut back to this size.
LOG_BYTES = 16 << 20


class Flush(threading.Event):
    """A mark in the queue, set when all items before it are committed."""


Item = StepRow | Detail | Flush


class Committer:
    """Commits the items of a queue until `finish` is called.

    Args:
        path: The run file.
        journal: The journal mode of SQLite.
        queue: Filled by the writer.
        every: The interval of sampled steps.
        continued: The state of the file before it was continued; None for a new one.
        stop: Called once from the thread with the reason, if recording cannot go on.

    Attributes:
        between: Held during a transaction.
        details: The number of peaks and samples taken from the queue.
        dropped, details_dropped: Counts of the writer, to be written into `meta`.
    """

    def __init__(
        self,
        path: Path,
        journal: Journal,
        queue: deque[Item],
        every: int,
        continued: Continued | None,
        stop: Callable[[str], None],
    ) -> None:
        self._path = path
        self._journal = journal
        self._queue = queue
        self._every = every
        self._continued = continued
        self._stop = stop
        self.between = threading.Lock()
        self.details = 0
        self.dropped = 0
        self.details_dropped = 0
        self._counts_written = (0, 0)
        self._tables: Tables | None = None
        self._wake = threading.Event()
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def start(self) -> None:
        """Start the thread; the record stops if the system allows no further one."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._stop(f"{type(error).__name__}: {error}")

    def wake(self) -> None:
        """Commit now."""
        self._wake.set()

    def finish(self, timeout: float) -> None:
        """Commit the rest of the queue and end the thread; wait for it."""
        self._finishing = True
        self._wake.set()
        # Not if it could not be started.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        if self._thread.is_alive():
            self._stop(f"the disk did not answer for {timeout:g} s")

    def _run(self) -> None:
        pending: list[Item] = []
        # A local variable: in a forked child this frame is never left, so that the
        # connection is not closed there.
        connection = None
        try:
            with self.between:
                connection = self._connect()
                self._file_id = _file_id(self._path)
            while True:
                finishing = self._finishing
                pending = pending or self._take()
                with self.between:
                    self._check_file()
                    self._keep_earlier_rows(connection, pending)
                    # False if another connection holds the file: try again.
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
            self._stop(f"{type(error).__name__}: {error}")
            _mark(pending)
            if connection is not None:
                with self.between:
                    connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            # rw: a deleted file must not be created again.
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
            # Locked by a reader: the present journal mode of the file works too.
            [(mode,)] = run("PRAGMA journal_mode").fetchall()
        run(f"PRAGMA journal_size_limit = {LOG_BYTES}").fetchall()
        # Both survive a loss of power; with a log, NORMAL is enough.
        run(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        return connection

    def _take(self) -> list[Item]:
        queue = self._queue
        return [queue.popleft() for _ in range(min(len(queue), BATCH))]

    def _check_file(self) -> None:
        """Raise if the file was deleted: SQLite would write to the unlinked file."""
        try:
            file_id = _file_id(self._path)
        except FileNotFoundError:
            raise FileNotFoundError("the file was deleted or moved") from None
        # Network file systems may change the inode number of a file.
        if self._journal == "wal" and file_id != self._file_id:
            raise FileExistsError("the file was replaced by another one")

    def _keep_earlier_rows(
        self, connection: sqlite3.Connection, items: list[Item]
    ) -> None:
        """Copy a continued file before the first of its rows is replaced."""
        before = self._continued
        if before is None or not any(
            isinstance(item, StepRow) and item.step <= before.last_step
            for item in items
        ):
            return
        self._continued = None
        name = keep_copy(connection, self._path, before.end).name
        resumed = read_meta(connection)["resumed"]
        resumed[-1]["kept"] = name
        items.insert(0, Meta({"resumed": resumed}))

    def _commit(self, connection: sqlite3.Connection, items: list[Item]) -> bool:
        """Write items in one transaction; False if the file is locked."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            tables = self._tables or Tables(connection, self._every)
            # Out of date unless the commit succeeds.
            self._tables = None
            _write(tables, items)
            counts = (self.dropped, self.details_dropped)
            if counts != self._counts_written:
                named = zip(("dropped", "details_dropped"), counts, strict=True)
                tables.add(Meta(dict(named)))
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if not is_locked(error):
                raise
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            return False
        self._counts_written, self._tables = counts, tables
        self.details += sum(isinstance(item, (Peaks, Samples)) for item in items)
        return True

    def _leave_one_file(self, connection: sqlite3.Connection) -> None:
        """Merge the log into the file, so that it can be copied and read anywhere."""
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            connection.execute("PRAGMA busy_timeout = 200")
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        except sqlite3.OperationalError as error:
            # A reader has the file open: the log, now empty, stays.
            if not is_locked(error):
                raise


def _write(tables: Tables, items: list[Item]) -> None:
    """Add items to the tables; consecutive steps are added together."""
    rows: list[StepRow] = []
    for item in items:
        if isinstance(item, StepRow):
            rows.append(item)
        elif not isinstance(item, Flush):
            tables.add_steps(rows)
            rows = []
            tables.add(item)
    tables.add_steps(rows)


def _mark(items: list[Item]) -> None:
    for item in items:
        if isinstance(item, Flush):
            item.set()


def _file_id(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
