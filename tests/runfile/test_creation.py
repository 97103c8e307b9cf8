"""The journal follows from the file system."""

from pathlib import Path

import pytest

from gradscale.runfile import RunWriter, creation, journal_for, open_run

MOUNTS = r"""
sysfs /sys sysfs rw 0 0
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/nvme0 /home/scratch xfs rw 0 0
//box/share /mnt/with\040space cifs rw 0 0
mds:/lustre /lustre lustre rw 0 0
bucket /mnt/bucket fuse.s3fs rw 0 0
/dev/sdb1 /mnt/disk fuseblk rw 0 0
gpfs0 /gpfs gpfs rw 0 0
beegfs_nodev /bee beegfs rw 0 0
/dev/sdc1 /twice ext4 rw 0 0
server:/twice /twice nfs rw 0 0
"""


@pytest.fixture
def mounts(tmp_path):
    listed = tmp_path / "mounts"
    listed.write_text(MOUNTS, encoding="utf-8")
    return listed


@pytest.mark.parametrize(
    ("path", "journal"),
    [
        ("/run.gs", "wal"),
        ("/home/me/run.gs", "truncate"),
        ("/home/scratch/me/run.gs", "wal"),
        ("/homework/run.gs", "wal"),
        ("/mnt/with space/run.gs", "truncate"),
        ("/lustre/run.gs", "truncate"),
        ("/mnt/bucket/run.gs", "truncate"),
        ("/mnt/disk/run.gs", "wal"),
        ("/gpfs/a/b/run.gs", "truncate"),
        ("/bee/run.gs", "truncate"),
        ("/twice/run.gs", "truncate"),
    ],
)
def test_a_network_file_system_gets_no_log(mounts, path, journal):
    assert journal_for(Path(path), mounts) == journal


def test_without_a_list_of_mounts_a_disk_is_local(tmp_path):
    assert journal_for(tmp_path / "run.gs", tmp_path / "none") == "wal"


def test_the_writer_asks(tmp_path, monkeypatch, mounts):
    mounts.write_text(f"server:/ {tmp_path} nfs rw 0 0\n", encoding="utf-8")
    monkeypatch.setattr(creation.journal_for, "__defaults__", (mounts,))
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 65536.0, True, "GS000")
        assert writer.flush()
        assert not (tmp_path / "run.gs-wal").exists()
        assert (tmp_path / "run.gs-journal").exists()
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["journal"] == "truncate"
    assert sorted(tmp_path.iterdir()) == [mounts, tmp_path / "run.gs"]


def test_a_local_disk_gets_a_log(tmp_path):
    with RunWriter(tmp_path / "run.gs", journal="wal") as writer:
        writer.step(1, 65536.0, True, "GS000")
        assert writer.flush()
        assert (tmp_path / "run.gs-wal").stat().st_size > 0
