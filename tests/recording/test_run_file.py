"""The run file of a recorder: its name, its folder, and failures of both."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import warnings

import pytest

from gradscale import StateError, StepRecord
from gradscale.recording.console import say
from gradscale.recording.recorded_run import RecordedRun
from gradscale.recording.recorder import Recorder
from gradscale.runfile import RunWriter, open_run
from gradscale.sinks import LoggingSink


@pytest.fixture(autouse=True)
def _no_log_handlers(monkeypatch):
    """Messages go to stderr, though pytest sets log handlers of its own."""
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda logger: False)


def healthy(step):
    return StepRecord(step, 1024.0, True, True, amax=3.0, loss=0.5)


def record(recorder, steps):
    """Record healthy steps and close the file."""
    run = RecordedRun(recorder=recorder)
    for step in steps:
        run.record_step(healthy(step))
    run.close()


def steps_of(path):
    with open_run(path) as run:
        return [row.step for row in run.steps()]


def test_a_folder_that_does_not_exist_is_refused_by_the_constructor(tmp_path):
    with pytest.raises(
        StateError, match=r"none does not exist.*folder that exists.*GS308"
    ):
        Recorder(tmp_path / "none" / "run.gs")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_write_needs_no_folder(tmp_path):
    record(Recorder(tmp_path / "none" / "run.gs", rank=1), [1])


def test_a_name_that_is_taken_gets_a_number_and_the_earlier_file_stays(
    tmp_path, capsys
):
    for count in (3, 2, 1):
        record(Recorder(tmp_path / "run.gs"), range(1, count + 1))
    assert steps_of(tmp_path / "run.gs") == [1, 2, 3]
    assert steps_of(tmp_path / "run.2.gs") == [1, 2]
    assert steps_of(tmp_path / "run.3.gs") == [1]
    lines = capsys.readouterr().err.splitlines()
    first, second = (line for line in lines if "exists" in line)
    assert first == "gradscale: run.gs exists: the run is recorded in run.2.gs"
    assert "run.3.gs" in second


SKIPPED = StepRecord(1, 1024.0, False, False)
IDLE = StepRecord(1, 1024.0, False, True, read=False)


@pytest.mark.parametrize(
    ("records", "counts"),
    [
        ([healthy(1)], "1 step"),
        ([healthy(1), SKIPPED, SKIPPED, healthy(1)], "4 steps, 2 skipped,"),
        ([healthy(1), IDLE, SKIPPED], "3 steps, 1 skipped, 1 without gradients,"),
    ],
)
def test_the_end_of_a_recorded_run_is_one_line_with_the_next_command(
    tmp_path, monkeypatch, capsys, records, counts
):
    monkeypatch.chdir(tmp_path)
    run = RecordedRun(recorder=Recorder("my run.gs"))
    for step, each in enumerate(records, start=1):
        run.record_step(each._replace(step=step))
    capsys.readouterr()
    run.close()
    run.close()
    # After the findings that are open at the end.
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"gradscale: {counts} recorded in my run.gs. Next: gradscale doctor 'my run.gs'"
    )


@pytest.mark.parametrize("settings", [{"quiet": True}, {"rank": 1}])
def test_a_quiet_recorder_and_another_rank_print_no_closing_line(
    tmp_path, capsys, settings
):
    record(Recorder(tmp_path / "run.gs", every_rank=True, **settings), [1, 2])
    assert capsys.readouterr().err == ""
    assert len(list(tmp_path.glob("*.gs"))) == 1


def test_the_closing_line_is_also_printed_if_the_process_ends_without_close(tmp_path):
    script = """
from gradscale import StepRecord
from gradscale.recording.recorded_run import RecordedRun
from gradscale.recording.recorder import Recorder
run = RecordedRun(recorder=Recorder("run.gs"))
run.record_step(StepRecord(1, 1024.0, True, True))
raise LookupError("no batch")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    *_, error, line = done.stderr.splitlines()
    assert error == "LookupError: no batch"
    assert line == (
        "gradscale: 1 step recorded in run.gs. Next: gradscale doctor run.gs"
    )


def test_a_name_that_is_taken_is_refused_by_the_constructor_on_request(tmp_path):
    record(Recorder(tmp_path / "run.gs"), [1])
    with pytest.raises(StateError, match=r"run\.gs exists already.*GS305"):
        Recorder(tmp_path / "run.gs", numbered=False)


def test_a_file_that_cannot_be_continued_is_refused_by_the_constructor(tmp_path):
    (tmp_path / "run.gs").write_bytes(b"x" * 5000)
    with pytest.raises(StateError, match="GS306"):
        Recorder(tmp_path / "run.gs", resume=True)


def test_a_relative_path_survives_a_change_of_directory(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)
    recorder = Recorder("run.gs")
    monkeypatch.chdir(tmp_path / "in")
    record(recorder, [1, 2])
    assert steps_of(tmp_path / "run.gs") == [1, 2]


def test_a_relative_path_in_a_removed_directory_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StateError, match=r"working directory.*absolute path.*GS308"):
        Recorder("run.gs")


def test_a_folder_removed_before_the_first_step_is_reported_once(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    recorder = Recorder(tmp_path / "runs" / "run.gs")
    shutil.rmtree(tmp_path / "runs")
    record(recorder, [1, 2, 3])
    assert capsys.readouterr().err.count("GS308") == 1
    assert not (tmp_path / "runs").exists()


def test_a_deleted_file_does_not_raise_where_warnings_are_errors(tmp_path, capsys):
    recorder = Recorder(tmp_path / "run.gs")
    run = RecordedRun(recorder=recorder)
    run.record_step(healthy(1))
    recorder.writer.flush()
    os.remove(tmp_path / "run.gs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.writer.flush()
        run.record_step(healthy(2))
        run.close()
    assert capsys.readouterr().err.count("GS308") == 1


def test_names_that_cannot_be_listed_do_not_stop_the_record(tmp_path):
    def names():
        raise ZeroDivisionError

    record(Recorder(tmp_path / "run.gs", names=names), [1])
    assert steps_of(tmp_path / "run.gs") == [1]


class Unprintable:
    def __str__(self):
        raise ZeroDivisionError


def nested():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize("value", [Unprintable(), {(1, 2): Unprintable()}, nested()])
def test_data_without_a_json_form_does_not_stop_the_record(tmp_path, value):
    recorder = Recorder(tmp_path / "run.gs", meta={"odd": value})
    recorder.begin()
    recorder.event("GS301", data=value)
    record(recorder, [1])
    assert steps_of(tmp_path / "run.gs") == [1]


# --- resumed runs -------------------------------------------------------------------


def test_a_resumed_run_continues_its_file(tmp_path):
    record(Recorder(tmp_path / "run.gs"), range(1, 6))
    record(Recorder(tmp_path / "run.gs", resume=True), range(6, 9))
    assert steps_of(tmp_path / "run.gs") == list(range(1, 9))
    assert [path.name for path in tmp_path.iterdir()] == ["run.gs"]


@pytest.mark.parametrize("start", [1, 4], ids=["from the start", "from a checkpoint"])
def test_a_resumed_run_that_goes_back_keeps_the_earlier_file(tmp_path, start):
    record(Recorder(tmp_path / "run.gs"), range(1, 6))
    record(Recorder(tmp_path / "run.gs", resume=True), range(start, start + 3))
    assert steps_of(tmp_path / "run.gs") == [*range(1, start), *range(start, start + 3)]
    assert steps_of(tmp_path / "run.2.gs") == [1, 2, 3, 4, 5]
    with open_run(tmp_path / "run.gs") as run:
        assert run.meta["resumed"][-1]["kept"] == "run.2.gs"
    with open_run(tmp_path / "run.2.gs") as run:
        assert run.meta["end"]["state"] == "closed"


def test_each_resumption_keeps_a_copy_of_its_own(tmp_path):
    for count in (5, 3, 2):
        record(Recorder(tmp_path / "run.gs", resume=True), range(1, count + 1))
    rows = {path.name: len(steps_of(path)) for path in tmp_path.iterdir()}
    assert rows == {"run.gs": 2, "run.2.gs": 5, "run.3.gs": 3}


def test_a_file_that_is_being_written_is_not_continued(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 8.0, True, "GS000")
        with pytest.raises(StateError, match=r"run\.gs is being written by.*GS305"):
            RunWriter(tmp_path / "run.gs", resume=True)
        record(Recorder(tmp_path / "run.gs", resume=True), [1, 2])
    assert steps_of(tmp_path / "run.gs") == [1]
    assert steps_of(tmp_path / "run.2.gs") == [1, 2]


def test_a_file_that_a_killed_process_left_is_continued(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 8.0, True, "GS000")
        # Of an earlier process with the same number.
        writer.set_meta(process_start="0")
        writer.flush()
        shutil.copy(tmp_path / "run.gs", tmp_path / "killed.gs")
        shutil.copy(tmp_path / "run.gs-wal", tmp_path / "killed.gs-wal")
    record(Recorder(tmp_path / "killed.gs", resume=True), [2])
    assert steps_of(tmp_path / "killed.gs") == [1, 2]


def test_threads_that_create_files_at_once_get_one_each(tmp_path):
    start, errors = threading.Barrier(8), []

    def work():
        start.wait()
        try:
            record(Recorder(tmp_path / "run.gs", quiet=True), [1, 2])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    files = sorted(tmp_path.iterdir())
    assert [steps_of(path) for path in files] == [[1, 2]] * 8


# --- sinks and messages -------------------------------------------------------------


class Failing:
    """A sink that raises in its second step."""

    def __init__(self):
        self.steps = []

    def see(self, record, judgement):
        self.steps.append(record.step)
        if len(self.steps) == 2:
            raise ConnectionError("no server")


class Seen(list):
    def see(self, record, judgement):
        self.append(record.step)


def test_a_finalizer_during_the_close_of_a_recorder_loses_no_row(tmp_path):
    recorder = Recorder(tmp_path / "run.gs", quiet=True)
    run = RecordedRun(recorder=recorder)
    run.record_step(healthy(1))

    def drain():
        # As when garbage is collected in the middle.
        recorder.let_go()
        run.record_step(healthy(2))

    recorder.before_end(drain)
    recorder.close()
    assert steps_of(tmp_path / "run.gs") == [1, 2]
    with open_run(tmp_path / "run.gs") as file:
        assert file.meta["end"]["state"] == "closed"


def test_a_sink_that_raises_is_reported_once_and_dropped(capsys):
    failing, seen = Failing(), Seen()
    run = RecordedRun(sinks=[failing, seen])
    for step in (1, 2, 3, 4):
        run.record_step(healthy(step))
    assert (failing.steps, seen) == ([1, 2], [1, 2, 3, 4])
    [line] = capsys.readouterr().err.splitlines()
    assert "Failing raised ConnectionError in step 2: no server" in line


def test_a_finding_that_a_sink_logs_is_not_logged_again(monkeypatch, caplog):
    monkeypatch.undo()
    sick = StepRecord(1, 8.0, False, False, loss_finite=False)
    with caplog.at_level(logging.INFO, logger="gradscale"):
        run = RecordedRun(sinks=[LoggingSink()])
        for step in range(1, 13):
            run.record_step(sick._replace(step=step))
    assert [record.message[:5] for record in caplog.records] == ["GS203"]


@pytest.mark.parametrize("stream", ["none", "closed"])
def test_a_message_without_a_stderr_does_not_raise(monkeypatch, tmp_path, stream):
    closed = (tmp_path / "err").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stream == "closed" else None)
    say("text", rank=0)
