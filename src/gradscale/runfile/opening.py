"""Opens a run file for reading. Writes nothing beside it, and trusts nothing in it."""

import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import NamedTuple

from gradscale.errors import StateError
from gradscale.runfile.schema import damaged, is_locked, refuse_foreign

# A commit takes milliseconds; on a busy network file system, seconds.
BUSY_SECONDS = 10.0
# Instructions of SQLite's virtual machine in one read: 10,000 steps take 200,000, the
# peaks of 100,000 tensors 3 million. In a damaged file a query may never end.
MOST_INSTRUCTIONS = 5_000_000
_COUNTED_BY = 100_000
# Bytes of a row.
LONGEST_ROW = 16 << 20
# The offset of the write version in SQLite's header, and its value for WAL.
_WRITE_VERSION = 18
_WAL = 2
# Errors of a damaged file. Beside SQLite's own: of a message that is not UTF-8, and of
# a text on a page that is lost.
_DAMAGE = (OSError, sqlite3.DatabaseError, UnicodeError, MemoryError)
# The end of a journal that names a file which SQLite deletes after the recovery.
_NAMES_A_FILE = bytes.fromhex("d9d505f920a163d7")


class Budget:
    """Ends a read after a number of instructions.

    Attributes:
        left: Instructions that the present read may still use.
    """

    def __init__(self) -> None:
        self.left: float = MOST_INSTRUCTIONS

    def spend(self) -> bool:
        """Count some instructions; return whether the read has to end."""
        self.left -= _COUNTED_BY
        return self.left < 0


class Opened(NamedTuple):
    """A run file open for reading.

    Attributes:
        connection: Reads it.
        budget: Bounds each read.
        folder: The folder of the temporary copy that is read; None if the file itself
            is open. Then it is closed after every read: an open connection would keep
            a writer from merging its log at the end.
        copied: `stat_of` the file before it was copied.
    """

    connection: sqlite3.Connection
    budget: Budget
    folder: tempfile.TemporaryDirectory[str] | None
    copied: tuple[object, ...] = ()


class _NeedsCopy(Exception):
    """SQLite would write beside the file before it reads."""


def open_readonly(path: Path) -> Opened:
    """Open a run file, or a temporary copy where SQLite would write before it reads.

    Raises:
        StateError: It is not a run file, too new, or damaged.
    """
    try:
        if not path.is_file():
            raise StateError(
                f"There is no file {path}. Nothing can be read from it. Pass the name "
                "given with record= or after gradscale run -o.",
                code="GS306",
            )
        return _open_in_place(path)
    except _NeedsCopy:
        pass
    except sqlite3.OperationalError as error:
        if is_locked(error):
            raise busy(path) from error
    except _DAMAGE as error:
        raise damaged(path, error) from error
    return _open_copy(path)


def busy(path: Path) -> StateError:
    """Return the error for a file that another process keeps locked."""
    return StateError(
        f"{path} was locked for {BUSY_SECONDS:g} s. Another process holds it in the "
        "middle of a change, so it cannot be read now. Try again; if the lock stays, "
        "end the process that has the file open.",
        code="GS306",
    )


def _open_in_place(path: Path) -> Opened:
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
    return Opened(connection, _checked(connection, path), None)


def _checked(connection: sqlite3.Connection, path: Path) -> Budget:
    """Limit the work of SQLite on a file, and refuse a file of another kind."""
    budget = Budget()
    try:
        connection.set_progress_handler(budget.spend, _COUNTED_BY)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_ROW)
        # No functions in the schema of the file; cells are checked before use.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        refuse_foreign(connection, path)
    except BaseException:
        connection.close()
        raise
    return budget


def _open_copy(path: Path) -> Opened:
    """Open a copy of a file for writing: SQLite recovers it first."""
    copied = stat_of(path)
    folder = tempfile.TemporaryDirectory(prefix="gradscale-")
    copy = Path(folder.name) / path.name
    try:
        for ending in ("", "-wal", "-journal"):
            source = _beside(path, ending)
            if source.exists():
                shutil.copyfile(source, _beside(copy, ending))
        _refuse_names(_beside(copy, "-journal"), path)
        connection = sqlite3.connect(copy, isolation_level=None)
        return Opened(connection, _checked(connection, path), folder, copied)
    except _DAMAGE as error:
        folder.cleanup()
        raise damaged(path, error) from error
    except BaseException:
        folder.cleanup()
        raise


def _refuse_names(journal: Path, path: Path) -> None:
    """Raise if a journal names a file. Transactions over several files do; ours do not.

    The name may be that of any file.
    """
    if journal.exists() and journal.read_bytes().endswith(_NAMES_A_FILE):
        raise damaged(path, ValueError("its journal names another file"))


def _is_wal(path: Path) -> bool:
    with path.open("rb") as file:
        header = file.read(_WRITE_VERSION + 1)
    return len(header) > _WRITE_VERSION and header[_WRITE_VERSION] == _WAL


def stat_of(path: Path) -> tuple[object, ...]:
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
