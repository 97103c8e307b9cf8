"""Opening a run file for reading, without leaving anything beside it."""

import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import NamedTuple

from gradscale.errors import StateError
from gradscale.runfile.schema import APPLICATION_ID, SCHEMA, identity

# Where SQLite's header says how the file is written, and what it says for WAL.
_WRITE_VERSION = 18
_WAL = 2
# A commit takes milliseconds; on a busy network file system, seconds.
BUSY_SECONDS = 10.0


class Opened(NamedTuple):
    """A run file that is open for reading.

    Attributes:
        connection: Reads it.
        folder: Where the copy is that is read instead; None if it is the file itself.
            Then it must be closed soon: a writer may come, and one that ends could
            not tidy up.
        copied: What the file and those beside it looked like before the copy.
    """

    connection: sqlite3.Connection
    folder: tempfile.TemporaryDirectory[str] | None
    copied: tuple[object, ...] = ()


def open_readonly(path: Path) -> Opened:
    """Open a run file for reading.

    The file may be one that is being written, that was left by a killed process, or
    that lies where nothing can be written. Where SQLite would have to write before it
    can read, a copy in a temporary folder is read.

    Raises:
        StateError: It is not a run file, too new, or damaged.
    """
    if not path.is_file():
        raise StateError(
            f"There is no file {path}. Nothing can be read from it. Look for the name "
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


def refuse_foreign(connection: sqlite3.Connection, path: Path) -> None:
    """Raise if an open file is not a run file that this version reads."""
    try:
        application, version = identity(connection)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise damaged(path, error) from error
    if application != APPLICATION_ID:
        raise StateError(
            f"{path} is not a run file. It lacks the mark that gradscale writes into "
            "every run file. Pass the file given with record= or after gradscale run "
            "-o.",
            code="GS306",
        )
    if version > SCHEMA:
        raise StateError(
            f"{path} has schema {version}; this version reads up to {SCHEMA}. Fields "
            "it does not know could be misread. Install the version of gradscale that "
            "wrote it, or a newer one.",
            code="GS307",
        )


def damaged(path: Path, error: Exception) -> StateError:
    """Return the error for a file that SQLite cannot read."""
    return StateError(
        f"{path} is damaged or not a run file: {error}. What it holds cannot be "
        "trusted. Copy it again together with the files of the same name that end in "
        "-wal or -journal, or save what is left with: sqlite3 FILE .recover",
        code="GS306",
    )


def is_locked(error: sqlite3.Error) -> bool:
    """Return whether another connection was in the way; it may not be later."""
    return "locked" in str(error)


def _busy(path: Path) -> StateError:
    return StateError(
        f"{path} was locked for {BUSY_SECONDS:g} s. Another process holds it in the "
        "middle of a change, so what it holds now cannot be read. Try again; if it "
        "stays so, end the process that has it open.",
        code="GS306",
    )


class _NeedsCopy(Exception):
    """SQLite would write beside the file before it reads."""


def _open_in_place(path: Path) -> Opened:
    how = "mode=ro"
    if _is_wal(path):
        if not beside(path, "-wal").exists():
            # Nobody writes to it now: who does has a log. Without this, SQLite would
            # make a log and leave it behind.
            how = "immutable=1"
        elif not beside(path, "-shm").exists():
            # A log that nobody has open: a copied or moved file.
            raise _NeedsCopy
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_SECONDS,
    )
    return Opened(_checked(connection, path), None)


def _checked(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    try:
        refuse_foreign(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_copy(path: Path) -> Opened:
    """Open a copy of a file, for writing: SQLite first puts it in order."""
    copied = looks_of(path)
    folder = tempfile.TemporaryDirectory(prefix="gradscale-")
    copy = Path(folder.name) / path.name
    try:
        for ending in ("", "-wal", "-journal"):
            source = beside(path, ending)
            if source.exists():
                shutil.copyfile(source, beside(copy, ending))
        connection = sqlite3.connect(copy, isolation_level=None)
        return Opened(_checked(connection, path), folder, copied)
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


def looks_of(path: Path) -> tuple[object, ...]:
    """Return what changes when somebody writes to a file."""
    found = []
    for ending in ("", "-wal", "-shm", "-journal"):
        try:
            seen = beside(path, ending).stat()
            found.append((seen.st_size, seen.st_mtime_ns))
        except OSError:
            # Not there, or not to be seen: whoever opens it says which.
            found.append((-1, -1))
    return tuple(found)


def beside(path: Path, ending: str) -> Path:
    """Return the path of a file that SQLite keeps beside another."""
    return path.with_name(path.name + ending)
