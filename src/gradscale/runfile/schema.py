"""The tables of a run file, schema 1; docs/runfile.md describes each field."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradscale.errors import StateError

# Goes up with every change of the tables: readers compare them with these.
SCHEMA = 1
# "gsrf" in the header of the SQLite file marks a run file.
APPLICATION_ID = 0x67737266

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    scale REAL NOT NULL,
    applied INTEGER NOT NULL,
    verdict TEXT NOT NULL,
    norm REAL,
    amax REAL,
    loss REAL
);
CREATE TABLE tensors (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE peaks (
    step INTEGER NOT NULL,
    tensor INTEGER NOT NULL REFERENCES tensors (id),
    peak REAL NOT NULL,
    PRIMARY KEY (step, tensor)
) WITHOUT ROWID;
CREATE TABLE samples (
    step INTEGER NOT NULL,
    tensor INTEGER NOT NULL REFERENCES tensors (id),
    total INTEGER NOT NULL,
    zeros INTEGER NOT NULL,
    subnormals INTEGER NOT NULL,
    below INTEGER NOT NULL,
    above INTEGER NOT NULL,
    nonfinite INTEGER NOT NULL,
    histogram BLOB NOT NULL,
    PRIMARY KEY (step, tensor)
) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    step INTEGER,
    time REAL NOT NULL,
    code TEXT NOT NULL,
    "where" TEXT,
    data TEXT NOT NULL
);
"""


def make_tables(connection: sqlite3.Connection, meta: dict[str, Any]) -> None:
    """Create all tables in an empty file, in one transaction."""
    connection.executescript(
        f"BEGIN; PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {SCHEMA};{TABLES}"
    )
    write_meta(connection, meta)
    connection.execute("COMMIT")


def write_meta(connection: sqlite3.Connection, meta: dict[str, Any]) -> None:
    """Set some entries of `meta`; values become JSON."""
    connection.executemany(
        "INSERT OR REPLACE INTO meta VALUES (?, ?)",
        [(key, as_json(value)) for key, value in meta.items()],
    )


def read_meta(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return all entries of `meta`."""
    rows = connection.execute("SELECT key, value FROM meta").fetchall()
    return {key: json.loads(value) for key, value in rows}


def as_json(value: Any) -> str:
    """Return a value as JSON; objects without a JSON form become their `str`.

    >>> as_json({"share": 0.5, "kind": {3}}), as_json({(1, 2): 3})
    ('{"share": 0.5, "kind": "{3}"}', '"{(1, 2): 3}"')
    """
    try:
        return json.dumps(value, default=_text)
    except (TypeError, ValueError, RecursionError):
        # A key that is not a string, or a circular or too deep reference.
        return json.dumps(_text(value))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:
        # User code, which may raise anything; recording must not.
        return f"<{type(value).__name__}>"


def steps_in(connection: sqlite3.Connection, table: str) -> Iterator[int]:
    """Yield the steps that have rows in `peaks` or `samples`, ascending.

    Jumps from step to step in the index; DISTINCT would read every row.
    """
    query = f"""
        WITH RECURSIVE found (step) AS (
            SELECT min(step) FROM {table}
            UNION ALL
            SELECT (SELECT min(step) FROM {table} WHERE step > found.step)
            FROM found WHERE step IS NOT NULL
        )
        SELECT step FROM found WHERE step IS NOT NULL
    """
    return (step for (step,) in connection.execute(query))


def refuse_foreign(connection: sqlite3.Connection, path: Path) -> None:
    """Raise if an open file is not a run file that this version reads.

    Raises:
        StateError: It is another file or damaged (GS306), or its schema is newer
            (GS307).
    """
    try:
        [(application,)] = connection.execute("PRAGMA application_id").fetchall()
        [(version,)] = connection.execute("PRAGMA user_version").fetchall()
        found = connection.execute("SELECT type, name, sql FROM sqlite_master")
        tables = {name: _squeezed(sql) for kind, name, sql in found if kind == "table"}
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
    if version < 1:
        raise damaged(path, ValueError(f"it has schema {version}"))
    _check_tables(tables, path)


def _check_tables(tables: dict[str, str], path: Path) -> None:
    """Raise if a table is missing, has other columns, or is a view or virtual.

    Args:
        tables: The statements of the tables of a file, by name.
        path: The file.
    """
    for statement in TABLES.strip().split(";\n"):
        wanted = _squeezed(statement.rstrip(";"))
        name = wanted.split()[2]
        if tables.get(name) != wanted:
            what = "has other columns" if name in tables else "is missing"
            raise damaged(path, ValueError(f"the table {name} {what}"))


def _squeezed(statement: object) -> str:
    return " ".join(statement.split()) if isinstance(statement, str) else ""


def damaged(path: Path, error: Exception) -> StateError:
    """Return the error for a file that SQLite cannot read."""
    # sqlite3 raises MemoryError, without a text, for a text on a page that is lost.
    why = str(error) or "a text cannot be read"
    return StateError(
        f"{path} is damaged or not a run file: {why}. Its content cannot be "
        "trusted. Copy it again together with the files of the same name that end in "
        "-wal or -journal, or recover the rest with: sqlite3 FILE .recover",
        code="GS306",
    )


def is_locked(error: sqlite3.Error) -> bool:
    """Return whether another connection held the file; a later attempt may succeed."""
    return "locked" in str(error)
