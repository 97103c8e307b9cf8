"""Two runs side by side: settings that differ, and the step where they part."""

import math

import pytest

from gradscale.diagnosis import compare_runs
from gradscale.runfile import RunWriter, open_run
from tests.diagnosis import runs


def compared(folder):
    with open_run(folder / "a.gs") as a, open_run(folder / "b.gs") as b:
        return compare_runs(a, b)


def write(path, rows, **meta):
    """Write rows of (step, scale, applied, verdict, norm, amax, loss)."""
    with RunWriter(path, meta=meta) as writer:
        for row in rows:
            writer.step(*row)


def rows(steps, **changed):
    """Return equal rows; those of `changed_at` have the changed columns."""
    row = {"scale": 4.0, "applied": True, "code": "GS000"}
    row |= {"norm": 0.5, "amax": 2.0, "loss": math.nan}
    at = changed.pop("changed_at", ())
    return [
        (step, *({**row, **changed} if step in at else row).values()) for step in steps
    ]


def test_a_run_is_the_same_as_itself(tmp_path):
    for name in ("a", "b"):
        runs.write(tmp_path / f"{name}.gs", runs.nan_loss())
    comparison = compared(tmp_path)
    assert (comparison.same, comparison.shared) == (True, 150)
    assert (comparison.partings, comparison.settings) == ((), ())


@pytest.mark.parametrize(
    ("column", "value"),
    [("scale", 8.0), ("applied", False), ("norm", None), ("amax", math.inf)],
)
def test_runs_part_at_the_first_step_at_which_a_column_differs(tmp_path, column, value):
    write(tmp_path / "a.gs", rows(range(1, 10)))
    changed = {column: value, "changed_at": (4, 6)}
    write(tmp_path / "b.gs", rows(range(1, 10), **changed))
    [parting] = compared(tmp_path).partings
    assert (parting.step, parting.column, parting.b) == (4, column, value)


def test_the_earliest_parting_comes_first(tmp_path):
    first = rows(range(1, 10), scale=8.0, changed_at=(7,))
    write(tmp_path / "a.gs", rows(range(1, 10)))
    write(tmp_path / "b.gs", [*rows((1, 2)), (3, *first[2][1:6], 1.0), *first[3:]])
    found = [(p.step, p.column) for p in compared(tmp_path).partings]
    assert found == [(3, "loss"), (7, "scale")]


def test_only_steps_that_both_have_are_compared(tmp_path):
    write(tmp_path / "a.gs", rows(range(1, 6)))
    write(tmp_path / "b.gs", rows(range(3, 9)))
    comparison = compared(tmp_path)
    assert (comparison.shared, comparison.partings, comparison.same) == (3, (), False)


def test_settings_that_differ_are_listed_with_their_place(tmp_path):
    write(tmp_path / "a.gs", rows((1,)), policy={"init": 1.0, "kind": "x"}, lr=0.1)
    write(tmp_path / "b.gs", rows((1,)), policy={"init": 2.0, "kind": "x"})
    found = compared(tmp_path).settings
    assert sorted(found) == [("lr", 0.1, "–"), ("policy.init", 1.0, 2.0)]
