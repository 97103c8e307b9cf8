"""Records rebuilt from rows: what a verdict says, and what a step inherits."""

import math

import pytest

from gradscale.core.records import Verdict, classify
from gradscale.diagnosis.records import Records
from gradscale.judge.history import Bounds, bounds_of
from gradscale.runfile import StepRow


def row(step, code, scale=1024.0, norm=None, amax=None, loss=None):
    taken = code in ("GS000", "GS209")
    return StepRow(step, 0.0, scale, taken, code, norm, amax, loss)


def rebuilt(*rows, floor=None):
    """Return the record of the last of some rows."""
    policy = {"min_scale": floor, "max_scale": 2.0**24}
    records = Records({} if floor is None else {"policy": policy})
    return [records.of(each) for each in rows][-1]


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.GENUINE])
def test_a_rebuilt_record_is_classified_as_it_was(verdict):
    begun = row(1, "GS002" if verdict is Verdict.CALIBRATING else "GS000")
    assert classify(rebuilt(begun, row(2, verdict.code))) is verdict


def test_gradients_that_are_never_finite_are_not_blamed_on_the_loss():
    record = rebuilt(row(1, "GS000"), row(2, "GS208", loss=1.0))
    assert (record.finite, record.loss_finite, record.read) == (False, True, True)


def test_a_step_is_calibrated_after_one_that_was_taken():
    first, second = row(1, "GS002"), row(2, "GS000")
    assert not rebuilt(first, second).calibrated
    assert rebuilt(first, second, row(3, "GS201")).calibrated


def test_a_file_that_begins_late_is_of_a_resumed_run():
    assert rebuilt(row(7, "GS000")).calibrated
    assert not rebuilt(row(1, "GS000")).calibrated


def test_a_file_that_begins_late_with_calibration_is_of_a_new_run():
    assert not rebuilt(row(7, "GS002")).calibrated


def test_a_scale_above_the_last_was_raised():
    assert rebuilt(row(1, "GS000", 4.0), row(2, "GS000", 8.0)).grown
    assert not rebuilt(row(1, "GS000", 8.0), row(2, "GS000", 8.0)).grown


def test_a_probing_step_was_raised_though_the_row_before_is_missing():
    assert rebuilt(row(5, "GS003")).grown


def test_steps_at_the_floor_are_counted_in_a_row():
    skips = [row(n, "GS201", 1.0) for n in (2, 3)]
    assert rebuilt(row(1, "GS000", 1.0), *skips, floor=1.0).floor_steps == 2
    again = row(4, "GS000", 1.0), row(5, "GS201", 1.0)
    assert rebuilt(*skips, *again, floor=1.0).floor_steps == 1


def test_steps_above_the_floor_are_not_counted():
    assert (
        rebuilt(row(1, "GS201", 2.0), row(2, "GS201", 2.0), floor=1.0).floor_steps == 0
    )


def test_steps_on_the_way_to_the_floor_are_not_counted():
    falling = row(1, "GS201", 4.0), row(2, "GS201", 2.0), row(3, "GS201", 1.0)
    assert rebuilt(*falling, floor=1.0).floor_steps == 1


def test_a_collapse_counts_as_three_though_rows_before_it_are_missing():
    assert rebuilt(row(9, "GS202")).floor_steps == 3


def test_the_loss_of_a_collapse_is_read_where_it_is_known():
    assert not rebuilt(row(9, "GS202", loss=math.nan)).loss_finite
    assert rebuilt(row(9, "GS202", loss=1.0)).loss_finite


def test_the_loss_of_a_collapse_is_that_of_the_step_before_where_it_is_not_known():
    assert not rebuilt(row(1, "GS203"), row(2, "GS202")).loss_finite
    assert rebuilt(row(1, "GS201"), row(2, "GS202")).loss_finite


def test_a_norm_that_overflows_has_gradients_that_are_finite():
    record = rebuilt(row(1, "GS000"), row(2, "GS204"))
    assert (record.finite, record.norm_finite) == (True, False)


def test_a_bad_loss_over_finite_gradients_keeps_them_finite():
    assert rebuilt(row(2, "GS203", amax=2.0)).finite
    assert not rebuilt(row(2, "GS203", amax=math.nan)).finite


def test_an_amax_that_is_nan_tells_of_nan():
    assert rebuilt(row(2, "GS201", amax=math.nan)).nan
    assert not rebuilt(row(2, "GS201", amax=math.inf)).nan


def test_an_idle_step_leaves_what_the_next_inherits():
    rows = row(1, "GS000", 4.0), row(2, "GS103", 8.0), row(3, "GS000", 8.0)
    assert rebuilt(*rows).grown


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"policy": None},
        {"policy": "torch"},
        {"policy": {"scale": 4.0}},
        {"policy": {"min_scale": 4.0, "max_scale": 4.0}},
        {"policy": {"min_scale": "low", "max_scale": 4.0}},
    ],
)
def test_a_policy_that_cannot_move_or_is_not_known_has_no_bounds(meta):
    assert bounds_of(meta) is None


def test_the_bounds_are_those_of_the_policy():
    meta = {"policy": {"min_scale": 1, "max_scale": 65536.0}}
    assert bounds_of(meta) == Bounds(1.0, 65536.0)
