"""The scale of a loss moves as apex's does, by the rule of the core."""

import pytest

from gradscale.apex.amp.scaler import LossScaler
from gradscale.apex.fp16_utils import DynamicLossScaler
from gradscale.errors import ConfigError


def run(scaler, steps):
    """Return a row for each step, with the columns of the recorded ones."""
    rows = []
    for _, overflow, *_ in steps:
        used = scaler.loss_scale()
        scaler._has_overflow = overflow
        skipped = scaler.update_scale()
        rows.append([used, overflow, skipped, scaler._loss_scale, scaler._unskipped])
    return rows


@pytest.mark.parametrize("number", range(9))
def test_an_exact_scaler_repeats_a_recorded_sequence(golden, number):
    sequence = golden["sequences"][number]
    scaler = LossScaler(**sequence["settings"], exact=True)
    assert run(scaler, sequence["steps"]) == sequence["steps"]


# Without a floor of its own, that of the second and third is lower; the eighth has a
# fixed scale and overflows.
@pytest.mark.parametrize("number", [0, 3, 4, 5, 6, 8])
def test_the_default_repeats_sequences_above_its_floor(golden, number):
    sequence = golden["sequences"][number]
    scaler = LossScaler(**sequence["settings"])
    assert run(scaler, sequence["steps"]) == sequence["steps"]


def test_all_recorded_sequences_are_covered(golden):
    assert len(golden["sequences"]) == 9
    assert golden["sequences"][7]["settings"] == {"loss_scale": 128.0}


def test_the_default_has_a_floor_where_apex_has_none():
    scaler = LossScaler("dynamic")
    rows = run(scaler, [[None, True]] * 60)
    assert rows[-1][3] == 2.0**-24
    exact = LossScaler("dynamic", exact=True)
    assert run(exact, [[None, True]] * 60)[-1][3] == 2.0**16 * 2.0**-60


def test_a_fixed_scale_skips_steps_that_are_not_finite():
    scaler = LossScaler(128.0)
    rows = run(scaler, [[None, True], [None, False], [None, True]])
    assert [row[2] for row in rows] == [True, False, True]
    assert scaler.loss_scale() == 128.0


def test_the_scale_doubles_on_every_2000th_finite_step(golden):
    scaler, changes = LossScaler("dynamic"), []
    for step in range(4000):
        scaler.clear_overflow_state()
        before = scaler.loss_scale()
        skipped = scaler.update_scale()
        if scaler.loss_scale() != before:
            row = [step, before, False, skipped, scaler.loss_scale(), scaler._unskipped]
            changes.append(row)
    assert changes == golden["default window, changes only"]


def test_a_script_can_change_window_floor_and_ceiling():
    scaler = LossScaler("dynamic")
    scaler._scale_seq_len = 1
    scaler._min_loss_scale, scaler._max_loss_scale = 2.0, 8.0
    assert (scaler._scale_seq_len, scaler._min_loss_scale) == (1, 2.0)
    scaler._min_loss_scale = None
    assert scaler._min_loss_scale == 2.0**-24
    scaler._min_loss_scale = 2.0
    scaler._loss_scale = 4
    assert [row[3] for row in run(scaler, [[None, False]] * 2)] == [8.0, 8.0]
    assert [row[3] for row in run(scaler, [[None, True]] * 3)] == [4.0, 2.0, 2.0]
    fixed = LossScaler(128.0)
    fixed._max_loss_scale = 8.0
    assert run(fixed, [[None, False]])[0][3] == 128.0


def test_a_floor_above_the_ceiling_is_refused():
    with pytest.raises(ConfigError, match="min_scale=2048"):
        LossScaler("dynamic", min_loss_scale=2048.0, max_loss_scale=1024.0)


@pytest.mark.parametrize("number", range(2))
def test_the_older_scaler_repeats_a_recorded_sequence(golden, number):
    sequence = golden["fp16_utils.DynamicLossScaler"][number]
    scaler = DynamicLossScaler(**sequence["settings"])
    for used, overflow, after in sequence["steps"]:
        assert scaler.loss_scale == used
        scaler.update_scale(overflow)
        assert scaler.loss_scale == after
