"""Advice follows from the evidence, and only from it."""

import pytest

from gradscale.judge.advice import ADVICE
from gradscale.judge.findings import SEVERITY
from tests.judge.advised import (
    BACKWARD,
    GREW,
    LOSS,
    NAMED,
    ROSE,
    SKIPS,
    said,
)


def test_every_code_that_is_found_has_advice():
    assert set(ADVICE) == {*SEVERITY, "GS001"}


@pytest.mark.parametrize("code", ["GS202", "GS208"])
def test_nan_under_a_finite_loss_points_at_a_derivative(code):
    assert "derivative" in said(code, BACKWARD)
    assert "derivative" not in said(code, BACKWARD, {"nan": False})


@pytest.mark.parametrize("code", ["GS202", "GS208"])
def test_infinity_without_nan_points_at_the_range(code):
    assert "even at S = 2^8" in said(code, BACKWARD, {"nan": False})
    assert "65504" not in said(code, BACKWARD)


def test_a_collapse_under_a_bad_loss_points_at_the_forward_pass_alone():
    text = said("GS202", BACKWARD, NAMED, {"loss_finite": False})
    assert text.startswith("The loss itself was not finite")


def test_a_tolerance_is_for_a_scale_that_holds_its_place():
    assert "tolerance" in said("GS201", SKIPS)
    assert "tolerance" not in said("GS201", SKIPS, {"falling": True})
    assert "tolerance" not in said("GS201", SKIPS, {"at_floor": True})
    assert "tolerance" not in said("GS201", SKIPS, GREW)


def test_skips_at_the_floor_point_at_the_floor():
    assert "min_scale" in said("GS201", SKIPS, {"at_floor": True})
    assert "min_scale" not in said("GS201", SKIPS)


def test_a_loss_that_was_never_finite_points_at_the_first_batch():
    assert "first batch" in said("GS203", LOSS, {"finite_before": False})
    assert "first batch" not in said("GS203", LOSS)


def test_a_loss_that_recovered_points_at_its_batches():
    assert "batches of these steps" in said("GS203", LOSS, {"over": True})
    assert "batches of these steps" not in said("GS203", LOSS)


def test_a_loss_that_recovered_before_points_at_its_batches_too():
    again = {"times": 3, "steps": 1}
    assert "batches of these steps" in said("GS203", LOSS, again)
    assert "batches of these steps" not in said("GS203", LOSS, {"times": 3})


def test_steps_that_were_taken_make_the_loss_useless_and_not_the_run():
    text = said("GS203", LOSS, {"applied": 6, "steps": 8, "scale": "2^7"})
    assert "steps were taken all the same, 6 of 8" in text
    assert "for nothing" not in text


@pytest.mark.parametrize(
    ("loss", "words"),
    [("nan", "0/0"), ("inf", "above 65504"), ("not finite", "Find the first module")],
)
def test_nan_and_infinity_in_the_loss_have_different_causes(loss, words):
    others = {"0/0", "above 65504", "Find the first module"} - {words}
    text = said("GS203", LOSS, {"loss": loss})
    assert words in text
    assert [other for other in others if other in text] == []


def test_a_scale_that_fell_for_a_loss_points_at_the_guard():
    assert "from 2^16 to 2^7" in said("GS203", LOSS, {"scale": "2^7"})
    assert "guard" not in said("GS203", LOSS)


def test_with_headroom_the_scale_to_use_is_named():
    seen = {"scale": "2^0", "scale_from": "2^0", "fallen": False}
    text = said("GS209", seen, {"headroom_bits": 14.0, "room": "2^12"})
    assert text == "There are 14 bits of headroom: raise the scale from 2^0 to 2^12."


def test_without_headroom_a_higher_scale_is_not_advised():
    seen = {"scale": "2^0", "scale_from": "2^0", "fallen": False}
    text = said("GS209", seen, {"headroom_bits": 2.0, "room": "2^0"})
    assert "would overflow" in text
    assert "raise" not in text


def test_a_scale_that_fell_before_comes_first():
    seen = {"scale": "2^0", "scale_from": "2^16", "fallen": True}
    assert "fallen from 2^16" in said("GS209", seen)


def test_a_loss_that_is_known_says_which_scale_it_leaves():
    text = said("GS206", {"scale": "2^16", "loss": 3.5, "fits": "2^14"})
    assert "a loss of 3.5 leaves room for a scale of 2^14" in text


def test_a_norm_without_growth_points_at_the_batch():
    assert "batch of this step" in said("GS204", {"scale": "2^16"})
    assert "batch of this step" not in said("GS204", {"scale": "2^16"}, ROSE)


@pytest.mark.parametrize(
    ("steps", "words"), [(10, "by 2^8"), (7, "by a factor of 2 to 16")]
)
def test_a_fixed_scale_is_lowered_by_as_much_as_it_failed(steps, words):
    assert words in said("GS205", {**SKIPS, "steps": steps, "of": 10})


@pytest.mark.parametrize(
    ("steps", "words"), [(0, "before the first step"), (5, "an edit in place")]
)
def test_weights_that_are_gone_were_so_before_or_were_written(steps, words):
    assert words in said("GS207", {"since": 6, "steps_before": steps})


@pytest.mark.parametrize(
    ("before", "words"), [(False, "No step of this run"), (True, "before step 90")]
)
def test_missing_gradients_are_new_or_were_never_there(before, words):
    assert words in said("GS103", {"since": 90, "gradients_before": before})


def test_a_falling_scale_asks_for_a_checkpoint():
    assert "checkpoint from before step 90" in said("GS210", {"since": 90})
