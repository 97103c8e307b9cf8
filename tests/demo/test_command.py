"""`gradscale demo` as a user calls it."""

import importlib
import inspect
import json
import math
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from gradscale.cli.demo import demo
from gradscale.demo import comparison
from gradscale.demo.settings import Settings
from tests.demo.invented import compared

APP = typer.Typer()
APP.command()(demo)


def call(*arguments):
    return CliRunner().invoke(APP, [*arguments, "--device", "cpu"])


def error_text(result):
    """Return the error as one line, without typer's box."""
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "shown.png"
    return call("--steps", "1", "--json", "--out", str(out)), out


def test_the_figure_is_written_as_png(done):
    result, out = done
    assert result.exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_json_has_standard_output_to_itself(done):
    data = json.loads(done[0].stdout)
    assert [row["name"] for row in data["table"]] == [
        "FP32",
        "BF16",
        "FP16 bare",
        "FP16 static",
        "FP16 dynamic",
    ]
    assert data["settings"]["steps"] == 1
    assert data["figure"] == str(done[1])
    assert len(data["reading"]) == 3
    assert data["table"][2]["lost_share"] > 0.4


def test_json_has_null_for_a_loss_that_is_not_finite(monkeypatch, tmp_path):
    broken = compared(bare=math.nan)
    monkeypatch.setattr(comparison, "compare", lambda settings, on_step: broken)
    result = call("--json", "--out", str(tmp_path / "figure.png"))
    assert "NaN" not in result.stdout
    assert json.loads(result.stdout)["table"][2]["final_loss"] is None


def test_the_work_is_announced_on_standard_error(done):
    assert "Training 7 runs of 1 steps on cpu." in done[0].stderr


def test_the_table_and_the_path_of_the_figure_are_printed(tmp_path):
    out = tmp_path / "shown.png"
    result = call("--steps", "1", "--out", str(out))
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert any(line.split()[:2] == ["FP16", "bare"] for line in lines)
    assert "gradients lost" in result.stdout
    assert "Figure written to" in result.stdout
    assert "\x1b" not in result.stdout
    # A path is not broken.
    assert max(map(len, lines[:-1])) <= 80


def test_the_help_has_the_depth_of_the_network():
    assert f"{Settings().depth} hidden layers" in inspect.getdoc(demo)


def test_a_figure_that_is_no_png_is_refused_before_training():
    result = call("--out", "figure.jpg")
    assert result.exit_code == 2
    assert "does not end in .png" in error_text(result)


def test_a_missing_folder_is_refused_before_training(tmp_path):
    result = call("--out", str(tmp_path / "none" / "figure.png"))
    assert result.exit_code == 2
    assert "does not exist" in error_text(result)


def test_a_missing_gpu_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = str(tmp_path / "figure.png")
    result = CliRunner().invoke(APP, ["--device", "cuda", "--out", out])
    assert result.exit_code == 2
    assert "finds no GPU" in error_text(result)


def test_a_python_without_its_sources_is_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    result = call("--out", str(tmp_path / "figure.png"))
    assert result.exit_code == 1
    assert "installed with its .py files" in error_text(result)


def test_a_missing_plotting_library_is_named_below_the_table(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("demo_figure", "figure_theme"):
        monkeypatch.delitem(sys.modules, f"gradscale.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "altair", None)
    result = call("--steps", "1")
    assert result.exit_code == 1
    assert "altair is not installed" in result.stderr
    assert "pip install 'gradscale[report]'" in result.stderr
    # The runs were not for nothing.
    assert "FP16 bare" in result.stdout
    assert "Figure written" not in result.stdout


def test_another_broken_import_is_not_hidden(monkeypatch):
    monkeypatch.delitem(sys.modules, "gradscale.report.demo_figure", raising=False)
    monkeypatch.setitem(sys.modules, "gradscale.report.demo_figure", None)
    result = call("--steps", "1")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert importlib.import_module("gradscale.demo.training")
