"""The sentences below the table agree with its values."""

import math

import pytest

from gradscale.demo.conclusions import headline, sentences
from tests.demo.invented import compared


def test_a_bare_run_that_loses_has_its_distance():
    text = sentences(compared())[0]
    assert "ends 0.28 above FP32" in text
    assert "45 % of its gradient elements" in text
    assert "loss is 3.08" in text
    assert "gives 3.07" in text


def test_a_bare_run_below_fp32_is_called_below():
    assert "ends 0.30 below FP32" in sentences(compared(bare=2.5))[0]


def test_a_bare_run_within_the_noise_is_called_so():
    assert "within the seed noise" in sentences(compared(bare=2.82))[0]
    assert headline(compared(bare=2.82)).startswith("FP16 follows FP32 here")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_bare_run_whose_loss_is_not_finite_is_called_failed(loss):
    assert "not finite" in sentences(compared(bare=loss))[0]
    assert "fails" in headline(compared(bare=loss))


def test_scaled_runs_within_the_noise_match():
    text = sentences(compared())[1]
    assert "match FP32: they end within 0.010 of it" in text
    assert "up to 0.050" in text
    assert headline(compared()) == (
        "Bare FP16 ends 0.28 above FP32; with loss scaling it follows FP32"
    )


def test_one_scaled_run_beyond_the_noise_is_not_called_a_match():
    assert (
        "do not both match FP32: they end up to 0.100 away"
        in (sentences(compared(static=2.90))[1])
    )
    assert "follows" not in headline(compared(static=2.90))


def test_a_scaled_run_whose_loss_is_not_finite_does_not_match():
    assert "do not both match" in sentences(compared(dynamic=math.nan))[1]


def test_the_range_of_the_dynamic_scale_is_given():
    text = sentences(compared())[2]
    assert "between 2^16 and 2^17; 1 of 100 steps were skipped" in text
    assert "skipped none of 100" in sentences(compared(skipped=()))[2]


def test_a_dynamic_scale_that_did_not_move_is_called_constant():
    text = sentences(compared(scales=(2.0**16,) * 100, skipped=()))[2]
    assert text == "The dynamic scale stayed at 2^16 and skipped none of 100 steps."
