"""`gradscale tail`: waits, follows, ends with the run or on Ctrl-C."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.diagnosis import following
from gradscale.diagnosis.following import Follower
from gradscale.runfile import RunWriter, open_run
from tests.diagnosis import runs

PATIENCE = 60.0
COMMAND = [sys.executable, "-m", "gradscale", "tail", "--every", "0.05"]


def call(*arguments):
    return CliRunner().invoke(app, ["tail", *map(str, arguments)])


@pytest.fixture
def started():
    """Return a function that starts `tail` in a process, which is killed at the end.

    SIGINT has its default handler, as in a terminal: a shell starts background jobs,
    such as a test run, with SIGINT ignored.
    """
    processes = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(*arguments, **options):
        command = [*COMMAND, *map(str, arguments)]
        processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    signal.signal(signal.SIGINT, before)


def next_line(process):
    """Return the next line of a process, parsed; kill the process if none comes."""
    late = threading.Timer(PATIENCE, process.kill)
    late.start()
    try:
        return json.loads(process.stdout.readline())
    finally:
        late.cancel()


# --- output ------------------------------------------------------------------


def test_json_has_a_line_for_each_step_and_each_finding(tmp_path):
    [finding] = runs.write(tmp_path / "run.gs", runs.nan_loss(steps=120))
    done = call(tmp_path / "run.gs", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    [printed] = [line["finding"] for line in lines if "finding" in line]
    assert done.exit_code == 0
    assert steps == list(range(1, 121))
    assert (printed["code"], printed["step"]) == ("GS203", finding.step)
    assert (lines[-1]["verdict"], lines[-1]["loss"]) == ("forward_nonfinite", "nan")


def test_a_pipe_gets_the_findings_and_a_summary_line(tmp_path):
    [finding] = runs.write(tmp_path / "run.gs", runs.nan_loss(steps=120))
    lines = call(tmp_path / "run.gs").stdout.splitlines()
    assert lines[0] == f"GS203 step {finding.step}: {finding.what}"
    assert lines[-1].startswith("collapse: step 120, scale ")


# --- following ------------------------------------------------------------------------


def test_a_missing_file_is_waited_for_and_followed(tmp_path, started):
    process = started(tmp_path / "run.gs", "--json", stdout=subprocess.PIPE)
    time.sleep(0.5)
    assert process.poll() is None
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in (1, 2, 3):
            writer.step(step, 1024.0, True, "GS000")
            assert next_line(process)["step"] == step
    assert process.wait(PATIENCE) == 0


def test_ctrl_c_ends_it_with_code_0(tmp_path, started):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        writer.flush()
        process = started(
            tmp_path / "run.gs",
            "--json",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert next_line(process)["step"] == 1
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=PATIENCE)
    assert (process.returncode, complaints) == (0, b"")


def test_ctrl_c_ends_the_waiting_with_code_0(tmp_path, started):
    process = started(tmp_path / "run.gs", stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"waiting for ")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 0


def test_a_terminal_gets_a_live_screen(tmp_path, started):
    runs.write(tmp_path / "run.gs", runs.nan_loss(steps=120))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "200", "LINES": "40", "TERM": "xterm"}
    process = started(tmp_path / "run.gs", stdout=theirs, env=environment)
    assert process.wait(PATIENCE) == 0
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:
        # Linux raises EIO when the other end is closed.
        pass
    finally:
        os.close(ours)
    assert b"  ended" in shown
    assert b"GS203" in shown


def test_a_rewound_run_is_read_again(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 11):
            writer.step(step, 1024.0, True, "GS000")
        writer.flush()
        with open_run(tmp_path / "run.gs") as run:
            follower = Follower(run)
            assert [seen.row.step for seen in follower.poll()] == list(range(1, 11))
            writer.step(5, 512.0, True, "GS000")
            writer.flush()
            assert [seen.row.step for seen in follower.poll()] == [1, 2, 3, 4, 5]
            assert (follower.steps, follower.last.scale) == (5, 512.0)


def test_a_long_run_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "AT_ONCE", 50)
    runs.write(tmp_path / "run.gs", runs.saw_tooth(120))
    with open_run(tmp_path / "run.gs") as run:
        follower = Follower(run)
        seen = [(len(follower.poll()), follower.behind, follower.ended) for _ in "123"]
    assert seen == [(50, True, False), (50, True, False), (20, False, True)]


def test_a_run_without_a_step_ends_with_a_line(tmp_path):
    RunWriter(tmp_path / "run.gs").close()
    done = CliRunner().invoke(app, ["tail", str(tmp_path / "run.gs")])
    assert (done.exit_code, done.stdout) == (0, "not judged: no steps recorded\n")


def test_followed_findings_are_those_of_the_finished_run(tmp_path):
    findings = runs.write(
        tmp_path / "run.gs", runs.nan_gradients(), culprits=runs.sick_tensors
    )
    with open_run(tmp_path / "run.gs") as run:
        follower = Follower(run)
        follower.poll()
    assert follower.findings == findings


def test_an_event_outside_the_steps_is_printed_once(tmp_path):
    path = tmp_path / "run.gs"
    with RunWriter(path) as writer:
        writer.event("GS301", data={"what": "the scaler was not resumed"})
        writer.step(1, 65536.0, True, "GS000")
    with open_run(path) as run:
        follower = Follower(run)
        assert [seen.findings for seen in follower.poll()] == [()]
        assert [found.code for found in follower.messages] == ["GS301"]
        follower.poll()
        assert follower.messages == []
        assert [found.code for found in follower.findings] == ["GS301"]
    done = call(path)
    assert done.stdout.count("the scaler was not resumed") == 1
    assert "findings: " in done.stdout
