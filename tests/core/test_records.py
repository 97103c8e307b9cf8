"""One classifier: which facts lead to which verdict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale import StepRecord, Verdict, classify
from gradscale.core.records import COLLAPSED_AFTER, LOST_TOO_MUCH

GOOD = StepRecord(step=1, scale=65536.0, applied=True, finite=True)
BAD = GOOD._replace(applied=False, finite=False)

RECORDS = st.builds(
    StepRecord,
    step=st.integers(1),
    scale=st.floats(2.0**-24, 2.0**126),
    applied=st.booleans(),
    finite=st.booleans(),
    loss_finite=st.booleans(),
    norm_finite=st.booleans(),
    read=st.booleans(),
    calibrated=st.booleans(),
    grown=st.booleans(),
    floor_steps=st.integers(0, 5),
    scaled_loss_finite=st.booleans(),
    weights_finite=st.booleans(),
    nan=st.booleans(),
    loss=st.none() | st.floats(),
    lost=st.none() | st.floats(0.0, 1.0),
)


def test_a_finite_step_is_ok():
    assert classify(GOOD) is Verdict.OK


def test_a_finite_step_is_ok_before_calibration_too():
    assert classify(GOOD._replace(calibrated=False)) is Verdict.OK


def test_a_step_that_read_nothing_had_no_gradients():
    assert classify(GOOD._replace(read=False, applied=False)) is Verdict.NO_GRADIENTS


def test_the_first_overflows_are_calibration():
    assert classify(BAD._replace(calibrated=False)) is Verdict.CALIBRATING


def test_an_overflow_right_after_a_growth_is_probing():
    assert classify(BAD._replace(grown=True)) is Verdict.PROBING


def test_an_overflow_out_of_the_blue_is_an_overflow():
    assert classify(BAD) is Verdict.OVERFLOW


def test_a_loss_that_is_not_finite_is_blamed_before_the_scale():
    assert classify(BAD._replace(loss_finite=False)) is Verdict.FORWARD_NONFINITE


def test_a_loss_that_is_not_finite_is_said_even_if_the_gradients_are():
    assert classify(GOOD._replace(loss_finite=False)) is Verdict.FORWARD_NONFINITE


def test_finite_gradients_with_an_unusable_norm_are_a_norm_overflow():
    record = GOOD._replace(applied=False, norm_finite=False)
    assert classify(record) is Verdict.NORM_OVERFLOW


def test_gradients_are_blamed_before_their_norm():
    assert classify(BAD._replace(norm_finite=False)) is Verdict.OVERFLOW


def test_a_scaled_loss_that_overflows_is_blamed_before_the_gradients():
    record = BAD._replace(scaled_loss_finite=False)
    assert classify(record) is Verdict.LOSS_OVERFLOW


def test_a_scaled_loss_that_overflows_is_blamed_at_the_start_too():
    record = BAD._replace(scaled_loss_finite=False, calibrated=False)
    assert classify(record) is Verdict.LOSS_OVERFLOW


def test_a_loss_that_is_not_finite_is_blamed_before_its_product_with_the_scale():
    record = BAD._replace(scaled_loss_finite=False, loss_finite=False)
    assert classify(record) is Verdict.FORWARD_NONFINITE


def test_weights_are_blamed_before_the_loss_that_follows_from_them():
    record = BAD._replace(weights_finite=False, loss_finite=False)
    assert classify(record) is Verdict.WEIGHTS_NONFINITE


def test_weights_that_are_not_finite_are_said_even_if_all_else_is():
    assert classify(GOOD._replace(weights_finite=False)) is Verdict.WEIGHTS_NONFINITE


def test_a_sample_that_lost_too_much_is_an_underflow():
    assert classify(GOOD._replace(lost=LOST_TOO_MUCH)) is Verdict.UNDERFLOW


@pytest.mark.parametrize("lost", [None, 0.0, LOST_TOO_MUCH - 0.01])
def test_a_sample_that_lost_little_is_ok(lost):
    assert classify(GOOD._replace(lost=lost)) is Verdict.OK


def test_a_norm_is_blamed_before_an_underflow():
    record = GOOD._replace(applied=False, norm_finite=False, lost=1.0)
    assert classify(record) is Verdict.NORM_OVERFLOW


def test_a_step_that_was_skipped_has_no_underflow():
    assert classify(BAD._replace(lost=1.0)) is Verdict.OVERFLOW


@pytest.mark.parametrize("steps", [0, 1, COLLAPSED_AFTER - 1])
def test_a_few_overflows_at_the_floor_are_no_collapse(steps):
    assert classify(BAD._replace(floor_steps=steps)) is Verdict.OVERFLOW


@pytest.mark.parametrize("loss_finite", [True, False])
@pytest.mark.parametrize("steps", [COLLAPSED_AFTER, COLLAPSED_AFTER + 1])
def test_enough_overflows_at_the_floor_are_a_collapse(steps, loss_finite):
    record = BAD._replace(floor_steps=steps, loss_finite=loss_finite)
    assert classify(record) is Verdict.COLLAPSE


@given(RECORDS)
def test_every_record_has_a_verdict(record):
    assert classify(record) in Verdict


@given(RECORDS)
def test_only_a_step_that_is_finite_throughout_is_ok(record):
    well = record.read and record.finite and record.loss_finite and record.norm_finite
    sound = record.weights_finite and (record.lost or 0.0) < LOST_TOO_MUCH
    calm = record.floor_steps < COLLAPSED_AFTER
    assert (classify(record) is Verdict.OK) == (well and sound and calm)


@given(RECORDS)
def test_one_step_alone_never_shows_that_no_scale_would_do(record):
    assert classify(record) is not Verdict.GENUINE


@pytest.mark.parametrize(
    ("verdict", "text", "code"),
    [
        (Verdict.OK, "ok", "GS000"),
        (Verdict.CALIBRATING, "calibrating", "GS002"),
        (Verdict.PROBING, "probing", "GS003"),
        (Verdict.NO_GRADIENTS, "no_gradients", "GS103"),
        (Verdict.OVERFLOW, "overflow", "GS201"),
        (Verdict.COLLAPSE, "collapse", "GS202"),
        (Verdict.FORWARD_NONFINITE, "forward_nonfinite", "GS203"),
        (Verdict.NORM_OVERFLOW, "norm_overflow", "GS204"),
        (Verdict.LOSS_OVERFLOW, "loss_overflow", "GS206"),
        (Verdict.WEIGHTS_NONFINITE, "weights_nonfinite", "GS207"),
        (Verdict.GENUINE, "genuine", "GS208"),
        (Verdict.UNDERFLOW, "underflow", "GS209"),
    ],
)
def test_a_verdict_has_a_word_and_a_code_that_never_change(verdict, text, code):
    assert (str(verdict), verdict.code) == (text, code)


def test_the_list_of_words_is_complete():
    assert len(Verdict) == 12
