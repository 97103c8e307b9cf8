"""What was said over a run is put together: once a place, and no more than is true."""

import pytest

from gradscale.judge.findings import Finding
from gradscale.judge.summary import folded, mended


def finding(code="GS203", where="", step=10, since=4, hopeless=False, **evidence):
    return Finding(
        code=code,
        where=where,
        step=step,
        since=since,
        what="it happened",
        cost="",
        evidence=evidence,
        advice=(),
        more="",
        hopeless=hopeless,
    )


@pytest.mark.parametrize(("well_at", "hopeless"), [(0, True), (10, True), (11, False)])
def test_what_was_hopeless_is_not_if_the_run_was_well_after_it(well_at, hopeless):
    (after,) = mended([finding(step=10, hopeless=True, nan=True)], well_at)
    assert after.hopeless == hopeless
    assert after.evidence == {"nan": True} | ({} if hopeless else {"mended": True})


def test_what_was_not_hopeless_is_left_as_it_is():
    assert mended([finding()], 20) == [finding()]


def test_findings_of_different_codes_or_places_are_left_as_they_are():
    found = [finding(), finding("GS208"), finding(where="a"), finding(where="b")]
    assert folded(found) == found


def test_the_same_code_and_place_is_one_finding_with_its_count_and_steps():
    found = [finding(step=10, since=4), finding(step=30, since=28, loss="nan")]
    (one,) = folded(found)
    assert (one.step, one.since) == (30, 4)
    assert one.what == "it happened; 2 times, said from step 10 to step 30"
    assert one.evidence == {
        "loss": "nan",
        "times": 2,
        "first_step": 10,
        "last_step": 30,
    }


def test_what_was_counted_is_more_than_what_was_said():
    found = [finding(times=1), finding(times=2), finding(times=8)]
    assert folded(found)[0].evidence["times"] == 8


def test_the_hopeless_one_speaks_for_all():
    found = [finding(step=10), finding(step=20, hopeless=True), finding(step=30)]
    (one,) = folded(found)
    assert (one.step, one.hopeless) == (20, True)
    assert (one.evidence["first_step"], one.evidence["last_step"]) == (10, 30)
