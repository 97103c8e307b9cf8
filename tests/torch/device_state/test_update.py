"""The end of a step: the policy's rule on tensors, and the rows it leaves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import PYTHON, DynamicScale, Observed, ScaleState, StaticScale
from gradscale.core.records import StepRecord
from gradscale.core.state import FixedState
from gradscale.torch.device_state.layout import (
    RING,
    ROW,
    DeviceRow,
    new_device_state,
    new_totals,
)
from gradscale.torch.device_state.update import (
    StepSummary,
    force_scale_,
    update_,
    update_idle_,
)

CPU = torch.device("cpu")


def _state(policy):
    first = policy.init_state()
    # As in the scaler: the scale is f32, counts are i32.
    dtypes = [torch.float32] + [torch.int32] * (len(first) - 1)
    pairs = zip(first, dtypes, strict=True)
    return type(first)(*(torch.tensor(value, dtype=dtype) for value, dtype in pairs))


def _summary(skip=0.0, *, stepped=True, norm=None):
    flag = torch.tensor(skip)
    norm = None if norm is None else torch.tensor(norm)
    totals = new_totals(CPU)
    scale = torch.tensor(8.0)
    return StepSummary(
        totals, scale, stepped, flag, flag, None, norm, torch.tensor(2.0)
    )


def _update(policy, state, kept, *parts, hold=False, forced=None):
    forced = None if forced is None else torch.tensor(forced)
    update_(
        policy,
        state,
        kept,
        parts,
        hold_on_bad_loss=hold,
        forced_scale=forced,
        kernels="plain",
    )


def _record(totals):
    return DeviceRow(*totals.row.tolist()).record(int(totals.counts[0]))


def _policies(growth, backoff):
    return st.builds(
        DynamicScale,
        init_scale=st.sampled_from([2.0**-24, 1.0, 3.0, 2.0**16, 2.0**126]),
        growth_factor=st.sampled_from(growth),
        backoff_factor=st.sampled_from(backoff),
        growth_interval=st.integers(1, 4),
        tolerance=st.sampled_from([0.0, 0.1, 0.4]),
    )


@given(_policies([2.0, 4.0], [0.5, 0.25]), st.lists(st.booleans(), max_size=30))
@settings(max_examples=60, database=None, deadline=None)
def test_tensors_move_as_the_rule_on_python_floats_says(policy, flags):
    state, kept = _state(policy), new_device_state(CPU, policy.init_scale)
    plain = policy.init_state()
    for finite in flags:
        _update(policy, state, kept, _summary(float(not finite)))
        plain = policy.next_state(plain, Observed(finite, 2.0, True), PYTHON.where)
        assert [value.item() for value in state] == list(plain)


@given(_policies([1.5, 1.001], [0.7, 0.999]), st.booleans())
@settings(max_examples=60, database=None, deadline=None)
def test_a_factor_that_is_no_power_of_two_is_within_one_ulp_a_move(policy, finite):
    state, kept = _state(policy), new_device_state(CPU, policy.init_scale)
    _update(policy, state, kept, _summary(float(not finite)))
    seen = Observed(finite, 2.0, True)
    plain = policy.next_state(policy.init_state(), seen, PYTHON.where)
    ulp = plain.scale * 2.0**-23
    assert abs(state.scale.item() - plain.scale) <= ulp
    assert [value.item() for value in state[1:]] == list(plain[1:])


def test_the_tensors_of_the_state_stay_the_same():
    policy = DynamicScale(growth_interval=1)
    state, kept = _state(policy), new_device_state(CPU, policy.init_scale)
    ids = [id(value) for value in state]
    dtypes = [value.dtype for value in state]
    _update(policy, state, kept, _summary())
    assert [id(value) for value in state] == ids
    assert [value.dtype for value in state] == dtypes
    assert state.scale.item() == 2.0**17


def test_a_fixed_state_does_not_move():
    policy = StaticScale(scale=8.0)
    state, kept = _state(policy), new_device_state(CPU, 8.0)
    assert isinstance(state, FixedState)
    _update(policy, state, kept, _summary(1.0))
    assert state.scale.item() == 8.0


def test_one_bad_part_moves_the_scale_for_all():
    policy = DynamicScale(init_scale=8.0)
    state, kept = _state(policy), new_device_state(CPU, 8.0)
    _update(policy, state, kept, _summary(), _summary(1.0), _summary())
    assert state.scale.item() == 4.0


@pytest.mark.parametrize(("forced", "scale"), [(32.0, 32.0), (0.0, 8.0), (1e39, 8.0)])
def test_a_scale_from_a_device_is_taken_within_the_bounds_only(forced, scale):
    policy = DynamicScale(init_scale=8.0)
    state, kept = _state(policy), new_device_state(CPU, 8.0)
    _update(policy, state, kept, _summary(), forced=forced)
    assert state.scale.item() == scale
    assert bool(kept.fields.refused) is (scale == 8.0)
    assert kept.total.row[ROW.index("refused")].item() == float(scale == 8.0)


@pytest.mark.parametrize(("forced", "scale"), [(32.0, 32.0), (0.0, 8.0)])
def test_a_scale_can_be_set_without_a_step(forced, scale):
    policy = DynamicScale(init_scale=8.0)
    state, kept = _state(policy), new_device_state(CPU, 8.0)
    force_scale_(policy, state, kept, torch.tensor(forced))
    assert state.scale.item() == scale
    assert kept.total.applied_and_skipped() == (0, 0)


@pytest.mark.parametrize(("hold", "scale"), [(False, 4.0), (True, 8.0)])
def test_a_bad_loss_holds_the_state_where_asked(hold, scale):
    policy = DynamicScale(init_scale=8.0)
    state, kept = _state(policy), new_device_state(CPU, 8.0)
    kept.fields.loss_trace.fill_(float("nan"))
    _update(policy, state, kept, _summary(1.0), hold=hold)
    assert state.scale.item() == scale
    assert not _record(kept.total).loss_finite
    assert kept.fields.loss_trace.item() == 0.0


def test_bad_steps_at_the_floor_are_counted_and_a_good_one_ends_the_count():
    policy = DynamicScale(init_scale=2.0, min_scale=2.0)
    state, kept = _state(policy), new_device_state(CPU, 2.0)
    counts = []
    for skip in (1.0, 1.0, 0.0, 1.0):
        _update(policy, state, kept, _summary(skip))
        counts.append(kept.fields.floor_steps.item())
    assert counts == [1.0, 2.0, 0.0, 1.0]


def test_a_row_is_read_back_as_the_record_it_was():
    kept, part = new_device_state(CPU, 8.0), _summary(norm=5.0)
    _update(DynamicScale(init_scale=8.0), _state(DynamicScale()), kept, part)
    expected = StepRecord(
        step=1,
        scale=8.0,
        applied=True,
        finite=True,
        calibrated=False,
        amax=2.0,
        grad_norm=5.0,
    )
    assert _record(part.totals) == expected
    assert _record(kept.total) == expected


def test_a_part_that_did_not_step_is_neither_applied_nor_skipped():
    kept, part = new_device_state(CPU, 8.0), _summary(stepped=False)
    _update(DynamicScale(init_scale=8.0), _state(DynamicScale()), kept, part)
    assert part.totals.applied_and_skipped() == (0, 0)
    assert not _record(part.totals).applied


def test_an_idle_account_says_that_nothing_was_read():
    kept, totals = new_device_state(CPU, 8.0), new_totals(CPU, applied=4, skipped=1)
    update_idle_(kept, [totals], whole=True)
    assert totals.applied_and_skipped() == (4, 1)
    record = _record(totals)
    assert record.step == 6
    assert (record.read, record.applied, record.grad_norm) == (False, False, None)
    assert _record(kept.total) == record._replace(step=1)


def test_a_bad_loss_without_gradients_is_not_held_against_the_next_step():
    policy, kept = DynamicScale(init_scale=8.0), new_device_state(CPU, 8.0)
    kept.fields.loss_trace.fill_(float("nan"))
    update_idle_(kept, [], whole=True)
    assert not _record(kept.total).loss_finite
    _update(policy, _state(policy), kept, _summary())
    assert _record(kept.total).loss_finite


def test_an_optimizer_that_is_idle_beside_others_leaves_the_total_alone():
    kept, totals = new_device_state(CPU, 8.0), new_totals(CPU)
    update_idle_(kept, [totals], whole=False)
    assert totals.counts.tolist() == [1, 0, 0]
    assert kept.total.counts.tolist() == [0, 0, 0]
    assert not kept.ring.any()


def test_the_row_of_each_step_goes_to_its_place_in_the_ring():
    policy, kept, rows = DynamicScale(init_scale=8.0), new_device_state(CPU, 8.0), []
    state = _state(policy)
    for skip in (0.0, 1.0, 0.0):
        _update(policy, state, kept, _summary(skip))
        rows.append(kept.total.row.tolist())
    _update(policy, state, kept, _summary(1.0), _summary())
    rows.append(kept.total.row.tolist())
    update_idle_(kept, [], whole=True)
    rows.append(kept.total.row.tolist())
    assert torch.allclose(kept.ring[:5], torch.tensor(rows), 0.0, 0.0, equal_nan=True)
    assert not kept.ring[5:].any()


@pytest.mark.parametrize("updates", [RING - 1, RING, 7 * RING + 5])
def test_the_ring_goes_round_by_the_count_of_updates(updates):
    policy, kept = DynamicScale(init_scale=8.0), new_device_state(CPU, 8.0)
    kept.total.set_counts(updates, 0)
    _update(policy, _state(policy), kept, _summary())
    assert kept.ring.any(dim=1).nonzero().tolist() == [[updates % RING]]


def test_an_account_stands_at_the_counts_it_was_made_with():
    assert new_totals(CPU, applied=4, skipped=1).applied_and_skipped() == (4, 1)


def test_a_state_of_the_shell_is_the_policys_own():
    assert isinstance(_state(DynamicScale()), ScaleState)
