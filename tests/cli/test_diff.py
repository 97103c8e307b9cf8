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
    """Return the files of two runs that diverge."""
    runs.write(tmp_path / "a.gs", runs.saw_tooth(400), lr=0.1)
    runs.write(tmp_path / "b.gs", runs.collapse(), lr=0.2)
    return tmp_path / "a.gs", tmp_path / "b.gs"


def test_the_first_step_at_which_they_diverge_is_printed(two):
    shown = call("diff", *two).stdout
    assert "The runs diverge at step 1: loss is missing in a, " in shown
    assert "Settings that differ" in shown
    assert "lr" in shown


def test_the_json_has_partings_and_both_runs(two):
    data = json.loads(call("diff", *two, "--json").stdout)
    assert data["parts_at"] == data["partings"][0]
    assert data["settings"] == [{"name": "lr", "a": 0.1, "b": 0.2}]
    assert (data["a"]["skipped"], data["b"]["skipped"]) == (3, 101)


@pytest.mark.parametrize(
    ("applied", "text"),
    [
        (True, "step 2: a took the step, b skipped it"),
        (False, "step 2: a skipped the step, b took it"),
    ],
)
def test_a_step_that_only_one_run_took_is_printed_in_words(tmp_path, applied, text):
    for name, taken in (("a", applied), ("b", not applied)):
        with RunWriter(tmp_path / f"{name}.gs") as writer:
            writer.step(1, 4.0, True, "GS000")
            writer.step(2, 4.0, taken, "GS000" if taken else "GS201")
    assert text in call("diff", tmp_path / "a.gs", tmp_path / "b.gs").stdout


def test_runs_that_differ_have_exit_code_1(two):
    assert call("diff", *two).exit_code == 1


def test_a_run_and_itself_have_exit_code_0(two):
    done = call("diff", two[0], two[0])
    assert (done.exit_code, "the same, step for step" in done.stdout) == (0, True)


def test_a_shorter_run_with_equal_steps_has_its_own_line(tmp_path):
    for name, steps in (("a", 5), ("b", 9)):
        with RunWriter(tmp_path / f"{name}.gs") as writer:
            for step in range(1, steps + 1):
                writer.step(step, 4.0, True, "GS000")
    done = call("diff", tmp_path / "a.gs", tmp_path / "b.gs")
    assert "the same in all 5 common steps" in done.stdout
    assert done.exit_code == 1


def test_runs_without_a_common_step_have_their_own_line(tmp_path):
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
