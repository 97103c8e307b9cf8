"""The words under the table say what the figures say."""

import math

import pytest

from gradscale.demo.conclusions import headline, sentences
from tests.demo.invented import compared


def test_a_bare_run_that_loses_is_said_to_lose():
    said = sentences(compared())[0]
    assert "ends 0.28 above FP32" in said
    assert "45 % of its gradient elements" in said
    assert "loss is 3.08" in said
    assert "gives 3.07" in said


def test_a_bare_run_below_fp32_is_said_to_be_below():
    assert "ends 0.30 below FP32" in sentences(compared(bare=2.5))[0]


def test_a_bare_run_within_the_noise_is_not_said_to_lose():
    assert "within the seed noise" in sentences(compared(bare=2.82))[0]
    assert headline(compared(bare=2.82)).startswith("FP16 follows FP32 here")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_bare_run_whose_loss_is_not_finite_is_said_to_be_broken(loss):
    assert "no longer finite" in sentences(compared(bare=loss))[0]
    assert "breaks" in headline(compared(bare=loss))


def test_scaled_runs_within_the_noise_match():
    said = sentences(compared())[1]
    assert "match FP32: they end within 0.010 of it" in said
    assert "up to 0.050" in said
    assert headline(compared()) == (
        "Bare FP16 ends 0.28 above FP32; with loss scaling it follows FP32"
    )


def test_one_scaled_run_beyond_the_noise_is_not_said_to_match():
    assert (
        "do not both match FP32: they end up to 0.100 away"
        in (sentences(compared(static=2.90))[1])
    )
    assert "follows" not in headline(compared(static=2.90))


def test_a_scaled_run_whose_loss_is_not_finite_does_not_match():
    assert "do not both match" in sentences(compared(dynamic=math.nan))[1]


def test_the_moves_of_the_dynamic_scale_are_told():
    said = sentences(compared())[2]
    assert "between 2^16 and 2^17; 1 of 100 steps were skipped" in said
    assert "skipped none of 100" in sentences(compared(skipped=()))[2]


def test_a_dynamic_scale_that_did_not_move_is_not_said_to_move():
    said = sentences(compared(scales=(2.0**16,) * 100, skipped=()))[2]
    assert said == "The dynamic scale stayed at 2^16 and skipped none of 100 steps."
