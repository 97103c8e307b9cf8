"""Gradients that are not finite at any scale are told from a scale not yet found."""

import math

import pytest

from gradscale import Verdict
from tests.judge.histories import dynamic
from tests.judge.judged import codes, falling, findings_of, renumbered, verdicts_of
from tests.judge.sick_runs import BAD, GOOD


@pytest.mark.parametrize(("bits", "nan"), [(8, True), (10, False)])
def test_gradients_that_are_bad_however_far_the_scale_falls_are_genuine(bits, nan):
    *before, last = verdicts_of(falling(bits, nan))
    assert last is Verdict.GENUINE
    assert Verdict.GENUINE not in before


def test_one_infinity_without_a_nan_asks_for_more_bits():
    records = falling(8, nan=True)
    records[-1] = records[-1]._replace(nan=False)
    assert verdicts_of(records)[-1] is Verdict.OVERFLOW


def test_eight_bits_in_three_steps_are_not_enough():
    fall = [BAD._replace(scale=2.0 ** (16 - 4 * i), nan=True) for i in range(4)]
    seen = verdicts_of(renumbered([GOOD] * 50 + fall))
    assert Verdict.GENUINE not in seen


@pytest.mark.parametrize("fits", [1.0, 0.0, -7.0])
def test_a_search_for_the_first_scale_may_meet_nan_far_below_1(fits):
    records = dynamic([fits] * 100, init=32)
    records = (r._replace(nan=not r.finite) for r in records)
    assert codes(findings_of(records)) == ("GS001",)


def search(fits, last_nan):
    """Return a search from 2^16 that meets NaN down to a scale, then infinity."""
    records = dynamic([fits] * 100)
    return (r._replace(nan=r.scale >= last_nan and not r.finite) for r in records)


def test_a_search_in_which_nan_turns_into_infinity_goes_on_below():
    assert codes(findings_of(search(-11.0, last_nan=2.0**-6))) == ("GS001",)


def test_a_search_that_meets_infinity_for_eight_steps_after_nan_is_hopeless():
    assert codes(findings_of(search(-13.0, last_nan=2.0**-6))) == ("GS001",)
    assert "GS208" in codes(findings_of(search(-14.5, last_nan=2.0**-6)))


def test_a_search_in_which_nan_comes_back_is_hopeless_at_once():
    records = list(dynamic([-20.0] * 25))
    kinds = [r._replace(nan=r.scale != 2.0**-7) for r in records]
    assert verdicts_of(kinds)[-1] is Verdict.GENUINE


def test_a_search_for_the_first_scale_may_meet_infinity_below_1():
    assert codes(findings_of(dynamic([-8.0] * 100, init=16))) == ("GS001",)


def test_a_search_that_meets_infinity_far_below_1_is_hopeless():
    assert codes(findings_of(dynamic([-9.0] * 20 + [-math.inf] * 6))) == ("GS208",)


def test_a_resumed_run_that_fits_nowhere_is_found_too():
    records = dynamic([-math.inf] * 11, first=900)
    assert codes(findings_of(records)) == ("GS208",)


def test_a_loss_that_is_not_finite_breaks_the_evidence_for_genuine():
    records = falling(10, nan=True)
    records[-4] = records[-4]._replace(loss_finite=False)
    assert codes(findings_of(records)) == ("GS203",)


def test_a_scaled_loss_that_overflows_is_no_evidence_for_genuine():
    fall = [
        BAD._replace(scale=2.0 ** (16 - bits), scaled_loss_finite=False, nan=True)
        for bits in range(14)
    ]
    last = BAD._replace(scale=4.0, nan=True)
    assert codes(findings_of(renumbered([*[GOOD] * 50, *fall, last]))) == ("GS206",)
