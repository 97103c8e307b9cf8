"""`gradscale diff`: two runs side by side."""

import json

import pytest
from typer.testing import CliRunner

from gradscale.cli import app
from gradscale.runfile import RunWriter
from tests.diagnosis import runs


def call(*arguments, columns=100):
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


@pytest.fixture
def two(tmp_path):
    """Return the files of two runs that part at step 300."""
    runs.write(tmp_path / "a.gs", runs.saw_tooth(400), lr=0.1)
    runs.write(tmp_path / "b.gs", runs.collapse(), lr=0.2)
    return tmp_path / "a.gs", tmp_path / "b.gs"


def test_the_first_step_where_they_part_is_told(two):
    shown = call("diff", *two).stdout
    assert "The runs part at step" in shown
    assert "Settings that differ" in shown
    assert "lr" in shown


def test_the_json_has_partings_and_both_runs(two):
    told = json.loads(call("diff", *two, "--json").stdout)
    assert told["parts_at"] == told["partings"][0]
    assert told["settings"] == [{"name": "lr", "a": 0.1, "b": 0.2}]
    assert (told["a"]["skipped"], told["b"]["skipped"]) == (3, 101)


def test_runs_that_differ_have_exit_code_1(two):
    assert call("diff", *two).exit_code == 1


def test_a_run_and_itself_have_exit_code_0(two):
    done = call("diff", two[0], two[0])
    assert (done.exit_code, "the same, step for step" in done.stdout) == (0, True)


def test_a_shorter_run_that_is_the_same_so_far_is_told_as_such(tmp_path):
    for name, steps in (("a", 5), ("b", 9)):
        with RunWriter(tmp_path / f"{name}.gs") as writer:
            for step in range(1, steps + 1):
                writer.step(step, 4.0, True, "GS000")
    done = call("diff", tmp_path / "a.gs", tmp_path / "b.gs")
    assert "the same in the 5 steps that both have" in done.stdout
    assert done.exit_code == 1


def test_runs_without_a_step_in_common_are_told_as_such(tmp_path):
    for name, step in (("a", 1), ("b", 2)):
        with RunWriter(tmp_path / f"{name}.gs") as writer:
            writer.step(step, 4.0, True, "GS000")
    done = call("diff", tmp_path / "a.gs", tmp_path / "b.gs")
    assert "no step in common" in done.stdout


@pytest.mark.parametrize("columns", [100, 70])
def test_a_screen_fits_the_terminal(two, columns):
    lines = call("diff", *two, columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns


def test_a_file_that_cannot_be_read_has_exit_code_3(two, tmp_path):
    done = call("diff", two[0], tmp_path / "none.gs")
    assert (done.exit_code, "GS306" in done.stderr) == (3, True)
