"""The reader: while it is written, from anywhere, and never at the file's cost."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from gradscale import OrderError, StateError
from gradscale.runfile import RunWriter, open_run, opening, reader
from tests.runfile import killed

JOURNALS = ["wal", "truncate"]


@pytest.fixture
def finished(tmp_path):
    """Return a finished run of 100 steps."""
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 101):
            writer.step(step, 65536.0, True, "GS000", loss=1.0 / step)
            writer.event("GS201", step=step)
    return tmp_path / "run.gs"


def left_by_a_kill(path, journal):
    """Leave the file of a killed process; its last commit may be cut short."""
    command = [sys.executable, killed.__file__, path, journal, "0.0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        for _ in range(200):
            process.stdout.read(killed.TOLD.size)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


# --- while it is written --------------------------------------------------------------


@pytest.mark.parametrize("journal", JOURNALS)
def test_two_readers_follow_a_run_of_another_process(tmp_path, journal):
    command = [sys.executable, killed.__file__, tmp_path / "run.gs", journal, "0.05"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "run.gs").exists():
            time.sleep(0.01)
        with open_run(tmp_path / "run.gs") as one, open_run(tmp_path / "run.gs") as two:
            seen = []
            while len(seen) < 3000 and process.poll() is None:
                seen += one.tail(seen[-1].step if seen else 0)
                two.check()
            assert process.poll() is None
            assert [row.step for row in seen] == list(range(1, len(seen) + 1))
            assert two.last_step >= len(seen)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_reader_that_takes_its_time_does_not_stop_the_writer(
    tmp_path, journal, monkeypatch
):
    monkeypatch.setattr(reader, "CHUNK", 10)
    with RunWriter(tmp_path / "run.gs", journal=journal) as writer:
        for step in range(1, 101):
            writer.step(step, 65536.0, True, "GS000")
        writer.flush()
        with open_run(writer.path) as run:
            rows = run.steps()
            assert next(rows).step == 1
            writer.step(101, 65536.0, True, "GS000")
            assert writer.flush()
            assert [row.step for row in rows] == list(range(2, 102))


@pytest.mark.parametrize("journal", JOURNALS)
def test_a_reader_that_never_rests_does_not_starve_the_writer(tmp_path, journal):
    with RunWriter(tmp_path / "run.gs", journal=journal) as writer:
        with open_run(writer.path) as run:
            for step in range(1, 4):
                writer.step(step, 65536.0, True, "GS000")
                begin = time.monotonic()
                while run.last_step < step and time.monotonic() - begin < 60.0:
                    pass
            assert run.last_step == 3
        assert writer.recording


def test_tail_gives_what_is_new(finished):
    with open_run(finished) as run:
        assert [row.step for row in run.tail(97)] == [98, 99, 100]
        assert run.tail(100) == []


def test_steps_come_whole_over_many_chunks(finished, monkeypatch):
    monkeypatch.setattr(reader, "CHUNK", 7)
    with open_run(finished) as run:
        assert [row.step for row in run.steps()] == list(range(1, 101))
        assert [event.step for event in run.events()] == list(range(1, 101))
        assert [event.id for event in run.events(after_id=98)] == [99, 100]


# --- nothing is written ---------------------------------------------------------------


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_reading_a_finished_run_writes_nothing(finished):
    before = listing(finished.parent)
    with open_run(finished) as run:
        assert run.last_step == 100
        assert listing(finished.parent) == before
    assert listing(finished.parent) == before


@pytest.mark.parametrize("journal", JOURNALS)
def test_reading_a_killed_run_makes_no_file(tmp_path, journal):
    left_by_a_kill(tmp_path / "run.gs", journal)
    before = sorted(os.listdir(tmp_path))
    with open_run(tmp_path / "run.gs") as run:
        run.check()
    assert sorted(os.listdir(tmp_path)) == before


def test_a_file_copied_without_its_log_is_read_as_it_is(tmp_path):
    with RunWriter(tmp_path / "run.gs", journal="wal") as writer:
        writer.step(1, 65536.0, True, "GS000")
        writer.flush()
        (tmp_path / "copy").mkdir()
        shutil.copy(tmp_path / "run.gs", tmp_path / "copy")
        with open_run(tmp_path / "copy" / "run.gs") as run:
            assert run.meta["schema"] == 1
        assert os.listdir(tmp_path / "copy") == ["run.gs"]


def with_its_log(folder):
    """Return the copy of a file of one step and of its log, without the log's index."""
    with RunWriter(folder / "run.gs", journal="wal") as writer:
        writer.step(1, 65536.0, True, "GS000")
        writer.flush()
        (folder / "copy").mkdir()
        for name in ("run.gs", "run.gs-wal"):
            shutil.copy(folder / name, folder / "copy")
    return folder / "copy" / "run.gs"


def test_a_file_copied_with_its_log_is_read_to_the_end(tmp_path):
    path = with_its_log(tmp_path)
    before = listing(path.parent)
    with open_run(path) as run:
        assert run.last_step == 1
        folder = run._opened.folder.name
    assert listing(path.parent) == before
    assert not os.path.exists(folder)


def test_a_copy_whose_file_can_no_longer_be_seen_is_said_to_be_gone(tmp_path):
    path = with_its_log(tmp_path)
    with open_run(path) as run:
        assert run.last_step == 1
        shutil.rmtree(path.parent)
        # No folder any more: it cannot even be asked for.
        path.parent.write_bytes(b"")
        with pytest.raises(StateError, match=r"run\.gs"):
            _ = run.last_step


def test_a_writer_that_comes_after_a_copy_was_opened_is_seen(tmp_path):
    # As a reader finds a writer that is beginning.
    path = with_its_log(tmp_path)
    with open_run(path) as run:
        assert run.last_step == 1
        with RunWriter(path, resume=True, journal="wal") as writer:
            writer.step(2, 65536.0, True, "GS000")
            writer.flush()
            assert run.last_step == 2
        assert run.last_step == 2


def test_a_transaction_that_was_cut_short_is_undone_in_a_copy(tmp_path):
    file = tmp_path / "run.gs"
    with RunWriter(file, journal="truncate") as writer:
        for step in range(1, 2001):
            writer.step(step, 65536.0, True, "GS000")
    # As a kill in the middle of a commit leaves it: pages changed, journal still there.
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE steps SET scale = 1.0")
    (tmp_path / "cut").mkdir()
    for name in ("run.gs", "run.gs-journal"):
        shutil.copy(tmp_path / name, tmp_path / "cut")
    connection.execute("ROLLBACK")
    connection.close()
    before = listing(tmp_path / "cut")
    with open_run(tmp_path / "cut" / "run.gs") as run:
        run.check()
        assert {row.scale for row in run.steps()} == {65536.0}
    assert listing(tmp_path / "cut") == before


# --- files that cannot be read --------------------------------------------------------


def refused(path):
    """Return the code and the text with which a file is refused."""
    with pytest.raises(StateError) as caught:
        read_whole(path)
    return caught.value.code, str(caught.value)


def read_whole(path):
    with open_run(path) as run:
        run.check()
        list(run.steps())


def test_a_file_that_is_not_there_is_refused(tmp_path):
    code, text = refused(tmp_path / "run.gs")
    assert code == "GS306"
    assert "There is no file" in text
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"step 1", b"x" * 5000])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "run.gs").write_bytes(content)
    assert refused(tmp_path / "run.gs")[0] == "GS306"
    assert (tmp_path / "run.gs").read_bytes() == content


def test_another_sqlite_file_is_refused(tmp_path):
    file = sqlite3.connect(tmp_path / "run.gs")
    file.execute("CREATE TABLE steps (step)")
    file.commit()
    file.close()
    code, text = refused(tmp_path / "run.gs")
    assert code == "GS306"
    assert "not a run file" in text


def test_a_newer_schema_is_refused(finished):
    file = sqlite3.connect(finished)
    file.execute("PRAGMA user_version = 2")
    file.close()
    code, text = refused(finished)
    assert code == "GS307"
    assert "schema 2; this version reads up to 1" in text


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_short_is_refused(finished, share):
    size = finished.stat().st_size
    os.truncate(finished, int(size * share) // 4096 * 4096 + 1)
    assert refused(finished)[0] == "GS306"


def test_damage_is_found_by_the_check(finished):
    content = bytearray(finished.read_bytes())
    # Page 3 on: inside of the tables, with the header left whole.
    content[8192:8400] = b"\xff" * 208
    finished.write_bytes(content)
    assert refused(finished)[0] == "GS306"


def test_damaged_meta_is_refused(finished):
    file = sqlite3.connect(finished)
    file.execute("UPDATE meta SET value = '{' WHERE key = 'end'")
    file.commit()
    file.close()
    with open_run(finished) as run, pytest.raises(StateError, match="GS306"):
        _ = run.meta


def test_a_lock_that_stays_is_said_to_be_one(finished, monkeypatch):
    monkeypatch.setattr(opening, "BUSY_SECONDS", 0.05)
    file = sqlite3.connect(finished, isolation_level=None)
    file.execute("BEGIN EXCLUSIVE")
    code, text = refused(finished)
    file.close()
    assert code == "GS306"
    assert "was locked for 0.05 s" in text


def test_a_closed_run_says_so(finished):
    run = open_run(finished)
    run.close()
    run.close()
    with pytest.raises(OrderError, match=r"was closed.*before close\(\)"):
        _ = run.meta
