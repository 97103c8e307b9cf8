"""The tables of a run file, version 1; docs/runfile.md tells what each field means."""

import json
import sqlite3
from typing import Any

# Goes up when a reader of the older version would misread the file.
SCHEMA = 1
# "gsrf" in the header of the SQLite file tells a run file from any other.
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
COLUMNS = {
    "steps": 8,
    "peaks": 3,
    "samples": 9,
    "events": 6,
    "meta": 2,
}


def make_tables(connection: sqlite3.Connection, meta: dict[str, Any]) -> None:
    """Make all tables in an empty file, in one transaction."""
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
    """Return a value as JSON; what JSON has no word for becomes its `str`.

    >>> as_json({"share": 0.5, "kind": {3}}), as_json({(1, 2): 3})
    ('{"share": 0.5, "kind": "{3}"}', '"{(1, 2): 3}"')
    """
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError):
        # A key that is no text, or a value that holds itself.
        return json.dumps(str(value))


def steps_in(connection: sqlite3.Connection, table: str) -> list[int]:
    """Return the steps that have rows in `peaks` or `samples`, ascending.

    Leaps from step to step in the index; DISTINCT would read every row.
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
    return [step for (step,) in connection.execute(query).fetchall()]


def identity(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the application id and the schema version of an open file."""
    [(application,)] = connection.execute("PRAGMA application_id").fetchall()
    [(version,)] = connection.execute("PRAGMA user_version").fetchall()
    return application, version
