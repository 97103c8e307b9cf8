"""Creates a run file, or prepares an existing one for a resumed run."""

import os
import platform
import re
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradscale.errors import StateError
from gradscale.runfile.schema import (
    SCHEMA,
    make_tables,
    read_meta,
    refuse_foreign,
    write_meta,
)

Journal = Literal["wal", "truncate"]

FRAMEWORKS = ("torch", "jax", "keras", "tensorflow", "mxnet")
MOUNTS = Path("/proc/self/mounts")
# A write-ahead log needs memory shared between its processes. These file systems do
# not share it between hosts, or not at all.
NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs",
        "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs",
        "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
    }
)  # fmt: skip


def path_for_rank(path: str | os.PathLike[str], rank: int) -> Path:
    """Return the file of a rank: for rank 0 the path itself, for others one beside it.

    >>> path_for_rank("run.gs", 0).name, path_for_rank("run.gs", 3).name
    ('run.gs', 'run.rank3.gs')
    """
    plain = Path(path)
    return (
        plain
        if rank == 0
        else plain.with_name(f"{plain.stem}.rank{rank}{plain.suffix}")
    )


def numbered_paths(path: Path) -> Iterator[Path]:
    """Yield the path, then numbered names beside it.

    >>> names = numbered_paths(Path("run.gs"))
    >>> [next(names).name for _ in range(3)]
    ['run.gs', 'run.2.gs', 'run.3.gs']
    """
    yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}.{number}{path.suffix}")


def journal_for(path: Path, mounts: Path = MOUNTS) -> Journal:
    """Return `wal` for a local disk and `truncate` for a network file system.

    Without a list of mounts (not Linux), every disk counts as local.

    >>> journal_for(Path("/run.gs"), mounts=Path("/no/such/list"))
    'wal'
    """
    try:
        text = mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return "wal"
    return "truncate" if is_network(filesystem_of(path, text)) else "wal"


def is_network(filesystem: str) -> bool:
    """Return whether a type of file system may be shared between hosts.

    >>> is_network("nfs4"), is_network("fuse.sshfs"), is_network("ext4")
    (True, True, False)
    """
    return filesystem in NETWORK or filesystem.split(".")[0] == "fuse"


def filesystem_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds a path; '' if none is listed."""
    resolved = path.resolve()
    found, depth = "", -1
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = Path(_unescaped(fields[1]))
        # >=: a later mount on the same directory hides the earlier one.
        if resolved.is_relative_to(mount) and len(mount.parts) >= depth:
            found, depth = fields[2], len(mount.parts)
    return found


def _unescaped(mount: str) -> str:
    """Undo the kernel's octal escapes: a space is listed as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), mount)


class Continued(NamedTuple):
    """The state of a run file before a resumed run continues it.

    Attributes:
        last_step: Its last step; 0 if it has none.
        end: Its end state, as in `meta`.
    """

    last_step: int
    end: dict[str, Any]


def check_path(path: Path, *, resume: bool, numbered: bool) -> None:
    """Raise if no run file can be created at `path`. Creates nothing.

    Args:
        path: The run file, absolute.
        resume: An existing file is to be continued.
        numbered: If the name is taken, another one is used.

    Raises:
        StateError: The file exists and is to be neither continued nor numbered
            (GS305), cannot be continued (GS306, GS307), or its folder does not exist
            or is not writable (GS308).
    """
    try:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"the folder {path.parent} does not exist")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"the folder {path.parent} is not writable")
        if not path.exists():
            return
        if not (resume or numbered):
            raise _taken(path)
        if resume:
            connection = _connect(path)
            try:
                refuse_foreign(connection, path)
            finally:
                connection.close()
    except (OSError, sqlite3.Error) as error:
        raise _not_writable(path, error) from error


def prepare(path: Path, meta: dict[str, Any], resume: bool) -> Continued | None:
    """Create the run file at `path`, or update the meta of an existing one.

    A new file appears with all its tables or not at all.

    Args:
        path: The run file.
        meta: Entries beside those of every run.
        resume: Continue an existing file.

    Returns:
        The state of the file that is continued; None for a new one.

    Raises:
        StateError: The file exists and `resume` is False, or another writer has it
            open (GS305); it cannot be continued (GS306, GS307), or cannot be created
            (GS308).
    """
    try:
        if path.exists():
            if not resume:
                raise _taken(path)
            return _continue(path, about(path, meta))
        _create(path, about(path, meta))
        return None
    except (OSError, sqlite3.Error) as error:
        raise _not_writable(path, error) from error


def about(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the `meta` entries of every run, and those given."""
    return {
        "schema": SCHEMA,
        "gradscale": sys.modules["gradscale"].__version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        # Only frameworks that are loaded already; nothing is imported here.
        "frameworks": {
            name: str(getattr(sys.modules[name], "__version__", "unknown"))
            for name in FRAMEWORKS
            if name in sys.modules
        },
        "command": list(sys.argv),
        "path": str(path.resolve()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": start_of(os.getpid()),
        "start": time.time(),
        "end": {"state": "running"},
        **meta,
    }


def start_of(pid: int) -> str | None:
    """Return the start time of a process, in ticks since boot; None if unknown.

    Distinguishes a process from a later one with the same PID.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses, which may hold spaces.
    fields = status.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else None


def keep_copy(connection: sqlite3.Connection, path: Path, end: dict[str, Any]) -> Path:
    """Copy an open run file to the next free numbered name; return the name.

    Args:
        connection: To the run file, outside a transaction.
        path: The run file.
        end: The end state to write into the copy.
    """
    spare = _spare(path)
    try:
        copy = sqlite3.connect(spare, isolation_level=None)
        try:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
            write_meta(copy, {"end": end})
        finally:
            copy.close()
        for name in numbered_paths(path):
            try:
                _publish(spare, name)
                return name
            except StateError:
                # Taken: by the run file itself, or by an earlier copy.
                continue
    finally:
        spare.unlink(missing_ok=True)
    raise AssertionError("numbered_paths() is endless")


def _spare(path: Path) -> Path:
    """Return a temporary name beside a run file, different for every thread."""
    thread = f"{os.getpid()}-{threading.get_ident()}"
    spare = path.with_name(f".{path.name}.{thread}.new")
    spare.unlink(missing_ok=True)
    return spare


def _create(path: Path, meta: dict[str, Any]) -> None:
    spare = _spare(path)
    try:
        connection = sqlite3.connect(spare, isolation_level=None)
        try:
            make_tables(connection, meta)
            # Set before the file has its name: a reader could block it later.
            connection.execute(f"PRAGMA journal_mode = {meta['journal']}").fetchall()
        finally:
            connection.close()
        _publish(spare, path)
    finally:
        spare.unlink(missing_ok=True)


def _publish(spare: Path, path: Path) -> None:
    """Give the file its name, unless another process has taken it."""
    try:
        # A link fails where a rename would replace an existing file.
        os.link(spare, path)
    except FileExistsError:
        raise _taken(path) from None
    except OSError:
        # Not every file system has links.
        if path.exists():
            raise _taken(path) from None
        os.rename(spare, path)


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None
    )


def _continue(path: Path, meta: dict[str, Any]) -> Continued:
    connection = _connect(path)
    try:
        refuse_foreign(connection, path)
        old = read_meta(connection)
        if _is_open(path, old):
            raise _in_use(path, old["pid"])
        [(last,)] = connection.execute("SELECT max(step) FROM steps").fetchall()
        # The first start is kept; all other entries are replaced.
        resumed = [*old.get("resumed", []), {"time": meta.pop("start"), "after": last}]
        connection.execute("BEGIN")
        write_meta(connection, {**meta, "resumed": resumed})
        connection.execute("COMMIT")
    finally:
        connection.close()
    return Continued(last or 0, old.get("end", {}))


def _is_open(path: Path, meta: dict[str, Any]) -> bool:
    """Return whether a process of this host still writes the file with this meta.

    A copy of a file that is being written has another path.
    """
    running = meta.get("end", {}).get("state") == "running"
    known = ("path", str(path.resolve())), ("host", socket.gethostname())
    started, pid = meta.get("process_start"), meta.get("pid")
    if not running or any(meta.get(key) != value for key, value in known):
        return False
    return started is not None and start_of(pid or 0) == started


def _not_writable(path: Path, error: Exception) -> StateError:
    return StateError(
        f"The run file {path} cannot be written: {error}. The run could not be "
        "recorded. Choose a folder that exists, has free space and is writable, "
        "or train without a record.",
        code="GS308",
    )


def _in_use(path: Path, pid: int) -> StateError:
    return StateError(
        f"The run file {path} is being written by process {pid}. Two writers would mix "
        "two runs in one file. End that process, or choose another name.",
        code="GS305",
    )


def _taken(path: Path) -> StateError:
    return StateError(
        f"The file {path} exists already. Writing to it would destroy the record of "
        "an earlier run. Choose another name, delete it, or pass resume=True to "
        "continue it.",
        code="GS305",
    )
