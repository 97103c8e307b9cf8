"""Which journal a file system can carry."""

import re
from pathlib import Path
from typing import Literal

Journal = Literal["wal", "truncate"]

MOUNTS = Path("/proc/self/mounts")
# A write-ahead log shares memory between processes; these cannot do so between hosts,
# or not at all.
NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs",
        "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs",
        "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
    }
)  # fmt: skip


def journal_for(path: Path, mounts: Path = MOUNTS) -> Journal:
    """Return `wal` for a local disk and `truncate` for a network file system.

    Where there is no list of mounts (not Linux), every disk counts as local.

    >>> journal_for(Path("/run.gs"), mounts=Path("/there/is/no/list"))
    'wal'
    """
    try:
        text = mounts.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return "wal"
    return "truncate" if is_network(kind_of(path, text)) else "wal"


def is_network(kind: str) -> bool:
    """Return whether a type of file system may be shared between hosts.

    >>> is_network("nfs4"), is_network("fuse.sshfs"), is_network("ext4")
    (True, True, False)
    """
    return kind in NETWORK or kind.split(".")[0] == "fuse"


def kind_of(path: Path, mounts: str) -> str:
    """Return the type of the file system a path lies on; '' if none is listed."""
    where = path.resolve()
    kind, depth = "", -1
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        place = Path(_plain(fields[1]))
        # >=: what is mounted later over the same place hides what was there.
        if where.is_relative_to(place) and len(place.parts) >= depth:
            kind, depth = fields[2], len(place.parts)
    return kind


def _plain(place: str) -> str:
    """Undo the kernel's octal escapes: a space is listed as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place)
