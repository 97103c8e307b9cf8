"""The writer: what it costs, what it leaves, who writes."""

import copy
import json
import os
import pickle
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest

import gradscale
from gradscale import ConfigError, StateError
from gradscale.runfile import RunWriter, open_run, path_for_rank
from gradscale.runfile.creation import prepare


def steps_of(path):
    with open_run(path) as run:
        return [row.step for row in run.steps()]


def python(script, *arguments):
    """Run a script in a process of its own; return it when it has ended."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- the hot path ---------------------------------------------------------------------


def test_handing_a_step_over_waits_for_no_disk(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        assert writer.hold(60.0)
        try:
            for step in range(1, 1001):
                writer.step(step, 65536.0, True, "GS000", 1.0, 2.0, 3.0)
            with open_run(tmp_path / "run.gs") as run:
                assert run.last_step == 0
        finally:
            writer.release()
    with open_run(tmp_path / "run.gs") as run:
        assert run.last_step == 1000


def test_thousands_of_steps_a_second_are_all_written(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 60_001):
            writer.step(step, 65536.0, True, "GS000")
        assert writer.dropped == 0
    assert steps_of(tmp_path / "run.gs") == list(range(1, 60_001))


def test_several_threads_may_record_events(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:

        def record():
            for number in range(200):
                writer.event("GS201", step=number)

        threads = [threading.Thread(target=record) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with open_run(tmp_path / "run.gs") as run:
        assert len(list(run.events())) == 800


def test_a_step_goes_to_the_disk_unasked(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer, open_run(writer.path) as run:
        # So that the log is there and the thread has just begun to wait.
        writer.step(1, 65536.0, True, "GS000")
        writer.flush()
        writer.step(2, 65536.0, True, "GS000")
        until = time.monotonic() + 60.0
        while run.last_step == 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert run.last_step == 2


def test_flush_waits_for_the_disk(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer, open_run(writer.path) as run:
        writer.step(1, 65536.0, True, "GS000")
        assert writer.flush()
        assert run.last_step == 1


# --- what is known of the run ---------------------------------------------------------


def test_meta_tells_what_ran_and_where(tmp_path):
    before = time.time()
    with RunWriter(tmp_path / "run.gs", meta={"policy": {"init_scale": 2.0**16}}) as w:
        w.set_meta(note="ß")
    with open_run(tmp_path / "run.gs") as run:
        meta = run.meta
    assert meta["schema"] == 1
    assert meta["gradscale"] == gradscale.__version__
    assert meta["python"] == sys.version.split()[0]
    assert meta["pid"] == os.getpid()
    assert meta["command"] == sys.argv
    assert before <= meta["start"] <= meta["end"]["time"] <= time.time()
    assert (meta["rank"], meta["world_size"]) == (0, 1)
    assert meta["policy"] == {"init_scale": 65536.0}
    assert meta["note"] == "ß"


def test_meta_names_the_frameworks_that_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"__version__": "9.1"}))
    RunWriter(tmp_path / "run.gs").close()
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["frameworks"]["torch"] == "9.1"


def test_values_of_meta_are_json(tmp_path):
    RunWriter(tmp_path / "run.gs", meta={"policy": [1, None]}).close()
    file = sqlite3.connect(tmp_path / "run.gs")
    [(value,)] = file.execute("SELECT value FROM meta WHERE key = 'policy'").fetchall()
    file.close()
    assert json.loads(value) == [1, None]


# --- the end --------------------------------------------------------------------------


def test_names_that_become_the_same_do_not_stop_the_record(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1.0, True, "GS000")
        writer.peaks(1, {"a\udc80": 1.0, "a\\udc80": 2.0})
        writer.step(2, 1.0, True, "GS000")
    with open_run(tmp_path / "run.gs") as run:
        assert (run.last_step, list(run.peaks(1))) == (2, ["a\\udc80"])


def test_names_that_no_reader_would_accept_are_changed(tmp_path):
    long = "n" * 20_000
    names = ["plain", "\udc80", f"{long}1", f"{long}2"]
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1.0, True, "GS000")
        for _ in range(2):
            writer.peaks(1, dict.fromkeys(names, 1.0))
        writer.event("GS201", step=1, where=f"{long}\ud800", data=names)
    with open_run(tmp_path / "run.gs") as run:
        found = list(run.peaks(1))
        [event] = run.events()
    assert found[:2] == ["plain", "\\udc80"]
    assert [name[:1000] for name in found[2:]] == ["n" * 1000] * 2
    assert len(set(found)) == 4
    assert event.where.startswith("nnn")


def test_closing_twice_does_nothing_more(tmp_path):
    writer = RunWriter(tmp_path / "run.gs")
    writer.close("finished")
    writer.close("again")
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["end"]["state"] == "finished"


def test_a_closed_run_is_one_file(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 65536.0, True, "GS000")
    assert os.listdir(tmp_path) == ["run.gs"]
    # 1 in both places: SQLite can read it where it can write nothing; 2 is for a log.
    assert (tmp_path / "run.gs").read_bytes()[18:20] == b"\1\1"


def test_a_run_that_ends_while_a_reader_is_open_is_one_file(tmp_path):
    writer = RunWriter(tmp_path / "run.gs", journal="wal")
    writer.step(1, 65536.0, True, "GS000")
    with open_run(tmp_path / "run.gs") as run:
        writer.close()
        assert run.last_step == 1
    assert os.listdir(tmp_path) == ["run.gs"]


def test_steps_after_the_end_are_not_recorded(tmp_path):
    writer = RunWriter(tmp_path / "run.gs")
    writer.close()
    writer.step(1, 65536.0, True, "GS000")
    assert not writer.recording
    assert steps_of(tmp_path / "run.gs") == []


def test_an_error_in_the_with_block_is_the_end_state(tmp_path):
    with pytest.raises(ZeroDivisionError), RunWriter(tmp_path / "run.gs"):
        _ = 1 / 0
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["end"]["state"] == "error"
        assert run.meta["end"]["error"] == "ZeroDivisionError"


UNCLOSED = """
    import sys
    from gradscale.runfile import RunWriter
    writer = RunWriter(sys.argv[1])
    writer.step(1, 65536.0, True, "GS000")
"""


def test_the_end_of_the_interpreter_writes_what_is_left(tmp_path):
    done = python(UNCLOSED, tmp_path / "run.gs")
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_of(tmp_path / "run.gs") == [1]
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["end"]["state"] == "exit"


def test_an_error_that_ends_the_interpreter_is_the_end_state(tmp_path):
    done = python(UNCLOSED + "    raise LookupError", tmp_path / "run.gs")
    assert done.returncode == 1
    assert steps_of(tmp_path / "run.gs") == [1]
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["end"] == run.meta["end"] | {
            "state": "error",
            "error": "LookupError",
        }


# --- who writes -----------------------------------------------------------------------


def test_ranks_but_the_first_write_nothing(tmp_path):
    with warnings.catch_warnings(), RunWriter(tmp_path / "run.gs", rank=3) as writer:
        writer.step(1, 65536.0, True, "GS000")
        writer.peaks(1, {"a": 1.0})
        writer.event("GS201")
        assert not writer.due(100)
        assert not writer.flush()
    assert (writer.path, writer.recording) == (None, False)
    assert os.listdir(tmp_path) == []


def test_every_rank_writes_its_own_file_when_asked_to(tmp_path):
    for rank in range(3):
        with RunWriter(
            tmp_path / "run.gs", rank=rank, world_size=3, every_rank=True
        ) as writer:
            writer.step(rank + 1, 65536.0, True, "GS000")
    assert sorted(os.listdir(tmp_path)) == ["run.gs", "run.rank1.gs", "run.rank2.gs"]
    assert steps_of(path_for_rank(tmp_path / "run.gs", 2)) == [3]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
def test_a_copy_of_a_writer_is_inert(tmp_path, duplicate):
    with RunWriter(tmp_path / "run.gs") as writer:
        other = duplicate(writer)
        other.step(1, 65536.0, True, "GS000")
        other.close()
        assert not other.recording
        assert writer.recording
    assert steps_of(tmp_path / "run.gs") == []


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "run.gs").write_bytes(b"mine")
    with pytest.raises(StateError, match=r"already.*resume=True") as caught:
        RunWriter(tmp_path / "run.gs")
    assert caught.value.code == "GS305"
    assert (tmp_path / "run.gs").read_bytes() == b"mine"


def test_a_file_that_appears_at_the_same_moment_is_not_overwritten(
    tmp_path, monkeypatch
):
    # Two processes find no file, and the other one is faster.
    monkeypatch.setattr(Path, "exists", lambda path: False)
    RunWriter(tmp_path / "run.gs", meta={"who": "first"}).close()
    with pytest.raises(StateError, match="GS305"):
        RunWriter(tmp_path / "run.gs", meta={"who": "second"})
    monkeypatch.undo()
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["who"] == "first"
    assert os.listdir(tmp_path) == ["run.gs"]


@pytest.mark.parametrize(("journal", "version"), [("wal", 2), ("truncate", 1)])
def test_a_new_file_has_its_journal_before_anybody_can_read_it(
    tmp_path, journal, version
):
    # Later the change could wait for a reader that never rests.
    prepare(tmp_path / "run.gs", {"journal": journal}, resume=False)
    assert (tmp_path / "run.gs").read_bytes()[18:20] == bytes([version] * 2)
    assert os.listdir(tmp_path) == ["run.gs"]


def test_a_file_system_without_links_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError))
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 65536.0, True, "GS000")
    assert steps_of(tmp_path / "run.gs") == [1]
    assert os.listdir(tmp_path) == ["run.gs"]


def test_a_file_that_cannot_be_made_whole_is_not_made(tmp_path, monkeypatch):
    failing = Mock(side_effect=sqlite3.OperationalError("database or disk is full"))
    monkeypatch.setattr("gradscale.runfile.creation.make_tables", failing)
    with pytest.raises(StateError, match=r"disk is full.*GS308"):
        RunWriter(tmp_path / "run.gs")
    assert os.listdir(tmp_path) == []


def test_a_distance_of_samples_below_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"sample_every=0 .*Pass 100"):
        RunWriter(tmp_path / "run.gs", sample_every=0)


def test_importing_gradscale_does_not_load_sqlite():
    done = python("import gradscale, sys; print('sqlite3' in sys.modules)")
    assert done.stdout == "False\n"
