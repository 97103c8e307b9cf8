"""Making a run file, or going on with one that is there."""

import os
import platform
import socket
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

from gradscale.errors import StateError
from gradscale.runfile.opening import refuse_foreign
from gradscale.runfile.schema import SCHEMA, make_tables, read_meta, write_meta

FRAMEWORKS = ("torch", "jax", "keras", "tensorflow", "mxnet")


def path_for_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Return where a rank writes: rank 0 the path itself, others beside it.

    >>> path_for_rank("run.gs", 0).name, path_for_rank("run.gs", 3).name
    ('run.gs', 'run.rank3.gs')
    """
    plain = Path(path)
    return (
        plain
        if rank == 0
        else plain.with_name(f"{plain.stem}.rank{rank}{plain.suffix}")
    )


def prepare(path: Path, meta: dict[str, Any], resume: bool) -> None:
    """Leave a run file at `path` that can be written to.

    The file appears with all its tables or not at all.

    Args:
        path: Where.
        meta: Entries beside those that every run has.
        resume: Go on with a file that is there.

    Raises:
        StateError: It is there and `resume` is False, or cannot be gone on with, or
            cannot be made.
    """
    try:
        if path.exists():
            if not resume:
                raise _taken(path)
            _go_on(path, about(meta))
        else:
            _create(path, about(meta))
    except (OSError, sqlite3.Error) as error:
        raise StateError(
            f"The run file {path} cannot be written: {error}. The run could not be "
            "recorded. Choose a folder that exists, has space and may be written to, "
            "or train without a record.",
            code="GS308",
        ) from error


def about(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `meta` that every run has, and those given."""
    return {
        "schema": SCHEMA,
        "gradscale": sys.modules["gradscale"].__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        # Asked of what is loaded; nothing is imported for it.
        "frameworks": {
            name: str(getattr(sys.modules[name], "__version__", "unknown"))
            for name in FRAMEWORKS
            if name in sys.modules
        },
        "command": list(sys.argv),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": time.time(),
        "end": {"state": "running"},
        **meta,
    }


def _create(path: Path, meta: dict[str, Any]) -> None:
    spare = path.with_name(f".{path.name}.{os.getpid()}.new")
    spare.unlink(missing_ok=True)
    try:
        connection = sqlite3.connect(spare, isolation_level=None)
        try:
            make_tables(connection, meta)
            # Now, while nobody can read it: later a reader could be in the way.
            connection.execute(f"PRAGMA journal_mode = {meta['journal']}").fetchall()
        finally:
            connection.close()
        _give_name(spare, path)
    finally:
        spare.unlink(missing_ok=True)


def _give_name(spare: Path, path: Path) -> None:
    """Give a file its name, unless another process was faster."""
    try:
        # A link fails where a rename would replace what is there.
        os.link(spare, path)
    except FileExistsError:
        raise _taken(path) from None
    except OSError:
        # Not every file system has links.
        if path.exists():
            raise _taken(path) from None
        os.rename(spare, path)


def _go_on(path: Path, meta: dict[str, Any]) -> None:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None
    )
    try:
        refuse_foreign(connection, path)
        old = read_meta(connection)
        [(last,)] = connection.execute("SELECT max(step) FROM steps").fetchall()
        # The first start stays; what else is known of the run is the newest.
        resumed = [*old.get("resumed", []), {"time": meta.pop("start"), "after": last}]
        connection.execute("BEGIN")
        write_meta(connection, {**meta, "resumed": resumed})
        connection.execute("COMMIT")
    finally:
        connection.close()


def _taken(path: Path) -> StateError:
    return StateError(
        f"There is a file {path} already. Writing to it would lose the record of an "
        "earlier run. Choose another name, delete it, or pass resume=True to go on "
        "with it.",
        code="GS305",
    )
