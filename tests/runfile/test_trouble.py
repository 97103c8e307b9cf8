"""What goes wrong with the file never takes the training down, and is said once."""

import os
import sqlite3
import warnings

import pytest

from gradscale import GradscaleWarning, StateError
from gradscale.runfile import RunWriter, open_run
from gradscale.runfile import committer as thread
from tests.runfile.test_writer import python, steps_of


@pytest.fixture
def small_disk(monkeypatch):
    """Make every file full at 30 pages, as SQLite sees it."""
    connect = sqlite3.connect

    def connect_to_small_disk(*args, **kwargs):
        connection = connect(*args, **kwargs)
        connection.execute("PRAGMA max_page_count = 30").fetchall()
        return connection

    monkeypatch.setattr(thread.sqlite3, "connect", connect_to_small_disk)


def fill(writer, steps=100_000):
    for step in range(1, steps + 1):
        writer.step(step, 65536.0, True, "GS000", 1.5, 2.5, 3.5)


def test_a_full_disk_is_said_once_and_recording_stops(tmp_path, small_disk):
    writer = RunWriter(tmp_path / "run.gs")
    writer.step(1, 65536.0, True, "GS000")
    assert writer.flush()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fill(writer)
        assert not writer.flush()
        fill(writer, steps=10)
        writer.event("GS201")
        writer.close()
    assert [warning.message.code for warning in caught] == ["GS308"]
    assert "full" in str(caught[0].message)
    assert not writer.recording


def test_what_was_written_before_the_disk_was_full_can_be_read(tmp_path, small_disk):
    writer = RunWriter(tmp_path / "run.gs")
    writer.step(1, 65536.0, True, "GS000")
    writer.flush()
    # Said by whichever call comes first after the thread has met the end of the disk.
    with pytest.warns(GradscaleWarning, match="GS308"), writer:
        fill(writer)
    with open_run(tmp_path / "run.gs") as run:
        run.check()
    # How many fitted depends on when the thread last wrote; none of them is torn out.
    kept = steps_of(tmp_path / "run.gs")
    assert kept == list(range(1, len(kept) + 1))
    assert 1 <= len(kept) < 100_000


LIMITED = """
    import resource, sys, time
    from gradscale.runfile import RunWriter
    writer = RunWriter(sys.argv[1], journal=sys.argv[2])
    writer.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    for step in range(1, 50_001):
        writer.step(step, 65536.0, True, "GS000", 1.5, 2.5, 3.5)
        if step % 1000 == 0:
            writer.flush()
    print("trained")
"""


@pytest.mark.parametrize("journal", ["wal", "truncate"])
def test_a_file_that_may_not_grow_leaves_the_training_alone(tmp_path, journal):
    done = python(LIMITED, tmp_path / "run.gs", journal)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("GS308") == 1
    with open_run(tmp_path / "run.gs") as run:
        run.check()
        assert run.last_step > 0


@pytest.mark.parametrize("journal", ["wal", "truncate"])
def test_a_deleted_file_is_noticed(tmp_path, journal):
    writer = RunWriter(tmp_path / "run.gs", journal=journal)
    writer.flush()
    os.remove(tmp_path / "run.gs")
    with pytest.warns(GradscaleWarning, match=r"deleted or moved.*GS308"):
        assert not writer.flush()
    assert not (tmp_path / "run.gs").exists()


def test_a_replaced_file_is_noticed_and_left_alone(tmp_path):
    writer = RunWriter(tmp_path / "run.gs", journal="wal")
    writer.flush()
    (tmp_path / "other").write_bytes(b"mine")
    os.replace(tmp_path / "other", tmp_path / "run.gs")
    with pytest.warns(GradscaleWarning, match=r"replaced by another"):
        writer.close()
    assert (tmp_path / "run.gs").read_bytes() == b"mine"


def test_a_deleted_folder_is_noticed(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    writer = RunWriter(folder / "run.gs")
    writer.flush()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.warns(GradscaleWarning, match="GS308"):
        writer.close()


def test_a_folder_that_is_not_there_is_refused_at_the_start(tmp_path):
    with pytest.raises(
        StateError, match=r"cannot be written.*folder that exists"
    ) as bad:
        RunWriter(tmp_path / "none" / "run.gs")
    assert bad.value.code == "GS308"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_refused_at_the_start(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(StateError, match="cannot be written"):
        RunWriter(tmp_path / "run.gs")


def test_a_file_that_turns_read_only_stops_the_record(tmp_path, monkeypatch):
    connect = sqlite3.connect

    def connect_readonly(name, **options):
        return connect(str(name).replace("mode=rw", "mode=ro"), **options)

    monkeypatch.setattr(thread.sqlite3, "connect", connect_readonly)
    writer = RunWriter(tmp_path / "run.gs")
    with pytest.warns(GradscaleWarning, match=r"readonly.*GS308"):
        writer.close()


def test_a_thread_that_cannot_be_started_stops_the_record(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(thread.threading.Thread, "start", refuse)
    writer = RunWriter(tmp_path / "run.gs")
    with pytest.warns(GradscaleWarning, match="can't start new thread") as caught:
        fill(writer, steps=3)
    writer.close()
    assert [warning.message.code for warning in caught] == ["GS308"]


def test_a_value_that_sqlite_cannot_keep_stops_the_record(tmp_path):
    writer = RunWriter(tmp_path / "run.gs")
    writer.step(1, 65536.0, True, "GS000")
    writer.flush()
    writer.step(2, 65536.0, True, "GS000", loss=object())
    with pytest.warns(GradscaleWarning, match=r"has stopped.*GS308"):
        writer.close()
    assert steps_of(tmp_path / "run.gs") == [1]


@pytest.mark.parametrize("journal", ["wal", "truncate"])
def test_a_lock_of_another_program_is_waited_for(tmp_path, monkeypatch, journal):
    monkeypatch.setattr(thread, "BUSY_SECONDS", 0.05)
    writer = RunWriter(tmp_path / "run.gs", journal=journal)
    writer.step(1, 65536.0, True, "GS000")
    writer.flush()
    other = sqlite3.connect(tmp_path / "run.gs", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    writer.step(2, 65536.0, True, "GS000")
    assert not writer.flush(timeout=0.5)
    other.execute("COMMIT")
    other.close()
    assert writer.flush()
    writer.close()
    assert steps_of(tmp_path / "run.gs") == [1, 2]


def test_a_commit_that_a_reader_holds_up_is_made_again_as_a_whole(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(thread, "BUSY_SECONDS", 0.05)
    writer = RunWriter(tmp_path / "run.gs", journal="truncate")
    writer.step(1, 65536.0, True, "GS000")
    writer.flush()
    other = sqlite3.connect(tmp_path / "run.gs", isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT * FROM steps").fetchall()
    writer.peaks(1, {"a": 1.0})
    assert not writer.flush(timeout=0.5)
    other.execute("COMMIT")
    other.close()
    writer.close()
    with open_run(tmp_path / "run.gs") as run:
        assert run.peaks(1) == {"a": 1.0}


def test_a_lock_that_stays_to_the_end_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(thread, "BUSY_SECONDS", 0.05)
    writer = RunWriter(tmp_path / "run.gs")
    writer.flush()
    other = sqlite3.connect(tmp_path / "run.gs", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.warns(GradscaleWarning, match="another process holds the file"):
        writer.close()
    other.close()


def test_a_disk_that_hangs_does_not_hold_the_training_up(tmp_path):
    writer = RunWriter(tmp_path / "run.gs", backlog=100)
    writer.flush()
    # It would wait for ever: nothing is written while this is held.
    with (
        writer._committer.between,
        pytest.warns(GradscaleWarning, match=r"100 rows wait.*GS309") as caught,
    ):
        fill(writer, steps=1000)
    assert len(caught) == 1
    assert writer.dropped >= 800
    writer.close()
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["dropped"] == writer.dropped
        assert 100 <= len(list(run.steps())) == 1000 - writer.dropped


def test_details_that_nobody_can_write_in_time_are_counted(tmp_path):
    writer = RunWriter(tmp_path / "run.gs")
    writer.flush()
    with writer._committer.between:
        for step in range(1, 101):
            writer.peaks(step, {"a": 1.0})
    writer.close()
    with open_run(tmp_path / "run.gs") as run:
        assert len(run.peak_steps()) == 64
        assert run.meta["details_dropped"] == 36


def test_a_disk_that_never_answers_does_not_keep_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("gradscale.runfile.writer.PATIENCE", 0.1)
    writer = RunWriter(tmp_path / "run.gs")
    writer.flush()
    with (
        writer._committer.between,
        pytest.warns(GradscaleWarning, match=r"did not answer for 0\.1 s"),
    ):
        writer.close()


def test_a_healthy_run_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with RunWriter(tmp_path / "run.gs") as writer:
            fill(writer, steps=10)
    assert steps_of(tmp_path / "run.gs") == list(range(1, 11))
