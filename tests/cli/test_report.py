"""`gradscale report`: one screen, JSON, and a PNG."""

import json
import os
import struct
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradscale.cli import _output, _run_files, app
from gradscale.runfile import RunWriter
from tests.diagnosis import runs


def call(*arguments, columns=100):
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


@pytest.fixture
def collapsed(tmp_path):
    """Return the file of a run that collapsed."""
    path = tmp_path / "run.gs"
    runs.write(path, runs.collapse(), culprits=runs.sick_tensors)
    return path


def test_the_screen_has_all_parts(collapsed):
    shown = call("report", collapsed).stdout
    parts = ["Scale", "Verdicts", "Phases", "Not finite", "Findings"]
    assert [part for part in parts if f"\n{part}\n" not in shown] == []
    assert "400 steps, 101 skipped (25.2 %)" in shown


def test_the_screen_has_an_underflow_table_where_there_are_samples(tmp_path):
    runs.write_sampled(tmp_path / "run.gs", [1.0] * 400)
    shown = call("report", tmp_path / "run.gs").stdout
    assert "\nUnderflow\n" in shown
    assert "at 2^-4" in shown


@pytest.mark.parametrize(
    ("command", "encoding"),
    [
        ("report", "cp1252"),
        ("report", "ascii"),
        ("report", "latin-1"),
        ("report", "cp437"),
        # One function encodes what any command prints.
        ("doctor", "ascii"),
        ("tail", "cp1252"),
        ("--help", "cp437"),
    ],
)
def test_an_encoding_without_the_characters_of_a_screen_is_no_error(
    collapsed, command, encoding
):
    done = subprocess.run(
        [sys.executable, "-m", "gradscale", command, str(collapsed)],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "100"},
        capture_output=True,
        check=False,
    )
    assert done.stderr == b""
    assert done.returncode in (0, 2)
    shown = done.stdout.decode(encoding)
    if command == "report":
        # The chart is in ASCII: nothing of it is replaced.
        axis = "       +" + "-" * 91
        assert axis in shown


@pytest.mark.parametrize("command", ["report", "doctor", "tail"])
def test_no_line_of_a_pipe_ends_in_blanks(collapsed, command):
    lines = call(command, collapsed).stdout.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("columns", [120, 80, 60, 44])
@pytest.mark.parametrize("history", [runs.healthy, runs.collapse, runs.nan_loss])
def test_the_screen_fits_the_terminal(tmp_path, history, columns):
    runs.write(tmp_path / "run.gs", history(), culprits=runs.sick_tensors)
    lines = call("report", tmp_path / "run.gs", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns


def test_the_json_has_the_values_of_the_screen(collapsed):
    data = json.loads(call("report", collapsed, "--json").stdout)
    assert (data["steps"], data["applied"], data["skipped"]) == (400, 299, 101)
    assert data["verdicts"]["genuine"] == 31
    assert data["scale"] == {
        "first": 2.0**15,
        "last": 2.0**-24,
        "lowest_log2": -24.0,
        "highest_log2": 15.0,
        "floor": 2.0**-24,
        "ceiling": 2.0**126,
    }
    assert [phase["name"] for phase in data["phases"]] == [
        "steady",
        "genuine",
        "collapse",
    ]
    assert data["culprits"][0]["name"] == "decoder.3.ffn.o.weight"


def test_a_run_without_a_step_is_reported(tmp_path):
    RunWriter(tmp_path / "run.gs").close()
    done = call("report", tmp_path / "run.gs")
    assert (done.exit_code, "no steps recorded" in done.stdout) == (0, True)


def test_a_run_in_progress_is_reported(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 1024.0, True, "GS000")
        writer.flush()
        shown = call("report", tmp_path / "run.gs").stdout
    assert "still running, or killed" in shown


def test_the_figure_is_written_as_png(collapsed, tmp_path):
    done = call("report", collapsed, "--png", tmp_path / "out.png")
    head = (tmp_path / "out.png").read_bytes()[:24]
    assert done.exit_code == 0
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:])[0] > 1000


@pytest.mark.parametrize(
    ("target", "text"), [("out.pdf", "does not end in .png"), ("no/a.png", "folder")]
)
def test_an_impossible_png_is_refused(collapsed, tmp_path, target, text):
    done = call("report", collapsed, "--png", tmp_path / target)
    assert done.exit_code == 2
    # Typer wraps long lines inside a box.
    assert text in " ".join(done.stderr.replace("│", " ").split())


def test_a_missing_plotting_library_is_named_with_the_install_line(
    collapsed, tmp_path, monkeypatch
):
    for name in ("figure_theme", "exponents", "run_figures"):
        monkeypatch.delitem(sys.modules, f"gradscale.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "altair", None)
    done = call("report", collapsed, "--png", tmp_path / "out.png")
    assert done.exit_code == 1
    assert "pip install 'gradscale[report]'" in done.stderr
    assert "400 steps, 101 skipped" in done.stdout
    assert "Figure written" not in done.stdout


def test_a_long_run_shows_its_progress_on_a_terminal(collapsed, monkeypatch):
    class Terminal(_output.Console):
        def __init__(self, **options):
            super().__init__(**options, force_terminal=True)

    monkeypatch.setattr(_run_files, "LONG", 1)
    monkeypatch.setattr(_output, "Console", Terminal)
    done = call("report", collapsed)
    assert "Reading 400 steps" in done.stderr
    assert "Reading" not in done.stdout


def test_names_are_not_shortened_in_a_pipe(tmp_path, monkeypatch):
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight"
    monkeypatch.delenv("COLUMNS", raising=False)
    runs.write(
        tmp_path / "run.gs",
        runs.collapse(),
        culprits=lambda record: () if record.finite else (name,),
    )
    lines = CliRunner().invoke(app, ["report", str(tmp_path / "run.gs")]).stdout
    [row] = [line for line in lines.splitlines() if line.startswith(f"  {name} ")]
    assert row.split()[1:] == ["101", "101", "0", "300", "–", "400"]
    # Charts and text are as wide as on a terminal of 80 columns.
    before, after = lines.split("Not finite")[0], lines.split("Findings")[1]
    assert max(map(len, before.splitlines())) <= 80
    assert max(map(len, after.splitlines())) <= 80
