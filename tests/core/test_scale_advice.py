"""Advice on the scale, in a line."""

import pytest

from gradscale.core.exponent_histogram import Histogram
from gradscale.core.scale_advice import advice
from tests.core.exponents import octaves

FLUSHED, FITTING = {-30: 41, -20: 59}, {-20: 40, 0: 60}


def test_a_scale_that_loses_much_is_to_be_raised():
    assert advice(octaves(FLUSHED)) == "raise S to 2^5: lost elements 41 % -> 0 %"


def test_the_scale_it_names_is_that_of_the_run_moved():
    assert advice(octaves(FLUSHED, scale=1000.0)).startswith("raise S to 32000: ")


def test_a_scale_that_fits_is_to_be_kept():
    assert advice(octaves(FITTING)) == (
        "keep S=2^0: lost elements 0 %; up to 2^15 nothing overflows"
    )


def test_a_scale_that_overflows_is_to_be_lowered():
    seen = Histogram(4.0, 0, 0, 14, (97, 0, 3), 0, 0)
    assert advice(seen) == "lower S to 2^1: overflowing elements 3.0 % -> 0 %"


def test_elements_that_are_not_finite_come_first():
    said = advice(octaves(FLUSHED, nonfinite=100))
    assert said.startswith("lower S from 2^0: 50 % of the elements are not finite")


@pytest.mark.parametrize(
    ("seen", "limit", "lost"),
    [
        (octaves({-43: 50, 10: 50}), "2^5", "50 %"),
        (octaves({0: 50}, deep=50, scale=4.0), "2^17", "50 %"),
    ],
    ids=["too wide", "too deep"],
)
def test_gradients_that_fit_at_no_scale_are_called_so(seen, limit, lost):
    said = advice(seen)
    assert said.startswith(f"no scale fits: {limit}, the largest")
    assert f"loses {lost} of the elements" in said
    assert "bfloat16" in said


def test_zeros_alone_tell_nothing():
    assert advice(octaves({}, zeros=9)) == (
        "S=2^0: every element is 0, which tells nothing"
    )


def test_zeros_beside_the_smallest_float16_call_for_a_higher_scale():
    assert advice(octaves({-24: 200, -23: 400, -22: 400}, zeros=100)).startswith(
        "raise S to 2^5: by the smallest that are left, backward flushed about 9.1 % "
        "of the elements, and 0.3 % there. "
    )


def test_a_higher_scale_for_flushed_zeros_does_not_overflow():
    seen = octaves({-24: 200, -23: 400, 14: 400}, zeros=100)
    assert advice(seen).startswith("raise S to 2^1: by the smallest")


def test_it_says_plainly_that_flushed_zeros_look_like_true_ones():
    said = advice(octaves(FITTING, zeros=300))
    assert "75 % of all elements are 0" in said
    assert "look like true zeros" in said


def test_a_few_zeros_are_not_worth_a_word():
    assert "zeros" not in advice(octaves({0: 1000}, zeros=2))
