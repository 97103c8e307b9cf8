"""`gradscale run`: the script does not notice, and one line is printed at the end."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

import gradscale.cli.run as run_command
from gradscale.cli.run import Recorded, closing_lines
from gradscale.runfile import RunWriter

# Prints everything a script can observe of the way it was started.
OBSERVE = """\
import os, sys
print(__name__, sys.argv, sys.path[:1], os.getcwd())
print([path for path in sys.path if "startup" in path], "torch" in sys.modules)
print(sys.stdin.read())
"""
NO_SCALER = "gradscale: nothing was recorded, because no PyTorch scaler was created."


def started(*command, folder, **more):
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        **more,
    )


def both(folder, *command, **more):
    """Run Python, then Python under `gradscale run`; return both results."""
    alone = started(*command, folder=folder, **more)
    return alone, started("-m", "gradscale", "run", *command, folder=folder, **more)


def last_line(text):
    """Return a text without its last line, and that line."""
    *before, last = text.splitlines(keepends=True)
    return "".join(before), last


def script(folder, text, name="train.py"):
    """Write a script; return its name."""
    (folder / name).write_text(text)
    return name


def test_a_script_observes_no_difference(tmp_path):
    train = script(tmp_path, OBSERVE)
    alone, run = both(tmp_path, train, "--lr", "1", "-o", "--", "-m", input="typed")
    assert alone.returncode == 0
    assert "typed" in alone.stdout
    assert (run.returncode, run.stdout) == (0, alone.stdout)


def test_a_script_in_another_folder_imports_its_neighbours(tmp_path):
    (tmp_path / "inner").mkdir()
    script(tmp_path / "inner", "here = 3\n", "neighbour.py")
    train = script(tmp_path, "import neighbour; print(neighbour.here)", "inner/a.py")
    alone, run = both(tmp_path, train)
    assert (run.returncode, run.stdout) == (alone.returncode, "3\n")


def test_a_module_is_run_as_by_python(tmp_path):
    (tmp_path / "package").mkdir()
    script(tmp_path, OBSERVE + "print(__package__, __spec__.name)", "package/train.py")
    alone, run = both(tmp_path, "-m", "package.train", "--help", "-o", input="")
    assert "package.train" in alone.stdout
    assert (run.returncode, run.stdout) == (0, alone.stdout)


@pytest.mark.parametrize("end", ["sys.exit(7)", "sys.exit('gone')", "1 / 0", "pass"])
def test_exit_code_and_output_are_the_scripts_and_one_line_follows(tmp_path, end):
    train = script(tmp_path, f"import sys\nprint('out')\n{end}\n")
    alone, run = both(tmp_path, train)
    errors, line = last_line(run.stderr)
    assert (run.returncode, run.stdout) == (alone.returncode, "out\n")
    assert errors == alone.stderr
    assert line.startswith(NO_SCALER)
    assert line.endswith("a JAX script is recorded by gradscale.jax.Recorder.\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_that_ends_the_script_ends_the_command(tmp_path, number):
    text = f"""
import os, signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.kill(os.getpid(), {number.value})
"""
    run = started("-m", "gradscale", "run", script(tmp_path, text), folder=tmp_path)
    assert run.returncode == -number
    assert run.stderr.startswith(NO_SCALER)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_sent_to_the_command_reaches_the_script(tmp_path, number):
    text = f"""
import pathlib, signal, sys, time
signal.signal({number.value}, lambda *_: sys.exit(5))
pathlib.Path("ready").touch()
time.sleep(60)
"""
    command = [sys.executable, "-m", "gradscale", "run", script(tmp_path, text)]
    # New session: no terminal sends the signal as well.
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        for _ in range(600):
            if (tmp_path / "ready").exists():
                break
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 5
    assert errors.decode().startswith(NO_SCALER)


def test_a_process_without_torch_does_not_load_it(tmp_path):
    text = """
import subprocess, sys
code = "import sys; print([m for m in sys.modules if m in ('torch', 'gradscale')])"
exec(code)
subprocess.run([sys.executable, "-c", code])
"""
    run = started("-m", "gradscale", "run", script(tmp_path, text), folder=tmp_path)
    assert run.stdout == "[]\n[]\n"


def test_find_spec_of_torch_keeps_the_import_hook(tmp_path):
    (tmp_path / "stand_in" / "torch").mkdir(parents=True)
    script(tmp_path, "", "stand_in/torch/__init__.py")
    text = """
import importlib.util, sys
sys.path.insert(0, "stand_in")
print(importlib.util.find_spec("torch") is not None, len(sys.meta_path))
import torch
print(torch.__spec__.loader.exec_module.__self__ is torch.__spec__.loader)
"""
    run = started("-m", "gradscale", "run", script(tmp_path, text), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[1] == "True"
    # The stand-in has no scalers: the hook has run, and reported it.
    assert "gradscale: nothing was recorded" in run.stderr
    assert "The script ran without gradscale" in run.stderr


def test_another_sitecustomize_still_runs(tmp_path):
    (tmp_path / "theirs").mkdir()
    script(tmp_path, "print('theirs')", "theirs/sitecustomize.py")
    text = "import sitecustomize; print(sitecustomize.__file__)"
    where = {"PYTHONPATH": str(tmp_path / "theirs")}
    train = script(tmp_path, text)
    alone, run = both(tmp_path, train, env={**os.environ, **where})
    assert alone.stdout.startswith("theirs\n")
    # Once for the script; the command itself starts with it too.
    assert run.stdout == "theirs\n" + alone.stdout


def test_an_existing_run_file_is_refused_before_anything_runs(tmp_path):
    train = script(tmp_path, "print('ran')")
    (tmp_path / "old.gs").write_text("precious")
    run = started("-m", "gradscale", "run", "-o", "old.gs", train, folder=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert "The file old.gs already exists" in re.sub(r"[\s│]+", " ", run.stderr)
    assert (tmp_path / "old.gs").read_text() == "precious"


def test_a_launcher_is_run_with_its_arguments(tmp_path):
    run = started("-m", "gradscale", "run", "echo", "-m", "--help", folder=tmp_path)
    assert (run.returncode, run.stdout) == (0, "-m --help\n")


def test_a_missing_script_is_named(tmp_path):
    run = started("-m", "gradscale", "run", "trian.py", folder=tmp_path)
    assert run.returncode == 2
    shown = re.sub(r"[\s│]+", " ", run.stderr)
    assert "trian.py is neither a script nor a command" in shown


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([(True, "GS000")], "1 step recorded"),
        ([(True, "GS203"), (False, "GS203")], "2 steps, 1 skipped, recorded"),
        ([(False, "GS103")] * 3, "3 steps, 3 without gradients, recorded"),
        (
            [(False, "GS103"), (False, "GS201"), (True, "GS000")],
            "3 steps, 1 skipped, 1 without gradients, recorded",
        ),
    ],
)
def test_the_closing_lines_counts_skips_and_steps_without_gradients(
    tmp_path, steps, text
):
    path = str(tmp_path / "run.gs")
    with RunWriter(path) as writer:
        for step, (applied, code) in enumerate(steps, start=1):
            writer.step(step, 1.0, applied, code)
    line = closing_lines(Recorded([path], 1, 1, "")).splitlines()[-1]
    assert line.startswith(f"gradscale: {text} in {path}. ")


def run_file(path, verdict, loss=1.0):
    """Write a run of 40 steps, of which the last ten are skipped; return its path."""
    with RunWriter(path) as writer:
        for step in range(1, 41):
            ok = step <= 30 or verdict == "GS000"
            code = "GS000" if ok else verdict
            writer.step(step, 1024.0, ok, code, loss=1.0 if ok else loss)
    return str(path)


STOPS = """\
import json, os
from gradscale.runfile import RunWriter
path = os.environ["GRADSCALE_RUN_FILE"]
with RunWriter(path) as writer:
    writer.step(1, 1.0, True, "GS000")
with open(os.environ["GRADSCALE_RUN_NOTES"], "a") as notes:
    print(json.dumps({"made": "GradScaler", "enabled": True}), file=notes)
    print(json.dumps({"file": path}), file=notes)
    print(json.dumps({"failed": "Recording has stopped: disk full."}), file=notes)
"""


def test_a_recording_that_stops_is_told_at_the_end(tmp_path):
    done = started(
        *("-m", "gradscale", "run", "-o", "run.gs", script(tmp_path, STOPS)),
        folder=tmp_path,
    )
    assert done.stderr.splitlines() == [
        "gradscale: Recording has stopped: disk full.",
        "gradscale: 1 step recorded in run.gs. Next: gradscale report run.gs",
    ]


def test_the_closing_lines_have_the_first_line_of_doctors_first_finding(tmp_path):
    path = run_file(tmp_path / "run.gs", "GS203", loss=float("nan"))
    finding, line = closing_lines(Recorded([path], 1, 1, "")).splitlines()
    doctor = started("-m", "gradscale", "doctor", path, folder=tmp_path)
    assert re.match(r"gradscale GS203 step \d+: the loss", finding)
    # Doctor breaks lines at 80 columns.
    assert finding.removeprefix("gradscale ") in re.sub(r"\s+", " ", doctor.stdout)
    assert line == (
        f"gradscale: 40 steps, 10 skipped, recorded in {path}. "
        f"Next: gradscale doctor {path}"
    )


def test_the_closing_line_of_a_healthy_run_points_to_the_report(tmp_path):
    path = run_file(tmp_path / "run.gs", "GS000")
    assert closing_lines(Recorded([path], 1, 1, "")) == (
        f"gradscale: 40 steps recorded in {path}. Next: gradscale report {path}"
    )


def test_a_finding_in_the_file_of_another_process_is_shown(tmp_path):
    healthy = run_file(tmp_path / "run.gs", "GS000")
    sick = run_file(tmp_path / "run.2.gs", "GS203", loss=float("nan"))
    finding, line = closing_lines(Recorded([healthy, sick], 2, 2, "")).splitlines()
    assert "GS203" in finding
    assert line == (
        f"gradscale: 40 steps recorded in {healthy} (and 1 more, one per process or "
        f"thread). Next: gradscale doctor {sick}"
    )


def test_a_diagnosis_that_fails_is_reported_and_not_raised(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("no rows")

    path = run_file(tmp_path / "run.gs", "GS000")
    monkeypatch.setattr(run_command, "diagnose_run", fail)
    assert closing_lines(Recorded([path], 1, 1, "")).splitlines() == [
        "gradscale: the diagnosis failed with ZeroDivisionError: no rows",
        f"gradscale: the run was recorded in {path}. Next: gradscale doctor {path}",
    ]


def test_gradscale_quiet_silences_the_closing_line(tmp_path):
    train = script(tmp_path, "import sys; sys.exit(3)")
    quiet = {**os.environ, "GRADSCALE_QUIET": "1"}
    run = started("-m", "gradscale", "run", train, folder=tmp_path, env=quiet)
    assert (run.returncode, run.stderr) == (3, "")


def test_the_help_has_examples(tmp_path):
    run = started("-m", "gradscale", "run", "--help", folder=tmp_path)
    for example in (
        "gradscale run train.py --lr 0.1",
        "gradscale run -m mypackage.train",
        "gradscale run torchrun --nproc-per-node 8 train.py",
        "gradscale run accelerate launch train.py",
    ):
        assert example in run.stdout
