"""Findings: their text, their JSON, their order, and what they make of a run."""

import json

import pytest

from gradscale.core.formatting import power
from gradscale.judge.catalogue import BY_CODE
from gradscale.judge.findings import (
    Finding,
    Health,
    by_severity,
    clear_recovered,
    merge_repeats,
)
from gradscale.judge.verdict_table import SEVERITY


def finding(code, step=10, hopeless=False, **fields):
    given = {
        "cause": "",
        "where": "",
        "since": 4,
        "what": "it happened",
        "cost": "6 batches lost",
        "evidence": {"since": 4, "loss_finite": True, "depth": 8.25},
        "advice": ("First.", "Then."),
        "more": f"gradscale explain {code}",
        **fields,
    }
    return Finding(code=code, step=step, hopeless=hopeless, **given)


NORMAL = finding("GS001", what="calibrated: S 2^24 -> 2^15 after 9 skips (normal)")


def test_what_is_normal_is_one_line():
    assert NORMAL.text() == "GS001 calibrated: S 2^24 -> 2^15 after 9 skips (normal)"


def test_what_is_not_has_what_where_since_cost_advice_and_the_command():
    assert finding("GS208", where="decoder.3.wo.weight").text() == (
        "GS208 step 10: it happened\n"
        "  where  decoder.3.wo.weight\n"
        "  since  step 4\n"
        "  seen   the loss was finite; depth 8.25\n"
        "  cost   6 batches lost\n"
        "  try 1  First.\n"
        "  try 2  Then.\n"
        "  more   gradscale explain GS208"
    )


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("GS103", "the parameters of the optimizer"),
        ("GS201", "the backward pass"),
        ("GS203", "the forward pass"),
        ("GS204", "the norm of all gradients"),
        ("GS206", "the loss"),
        ("GS207", "the weights"),
    ],
)
def test_where_nothing_is_named_a_place_to_look_is(code, place):
    assert f"  where  {place}\n" in finding(code).text()


def test_where_no_tensor_is_the_place_their_number_is():
    seen = {"culprits": 4, "tensors": 4}
    assert "  where  4 of 4 tensors\n" in finding("GS208", evidence=seen).text()


def test_a_collapse_of_the_loss_is_in_the_forward_pass():
    text = finding("GS202", evidence={"loss": "nan"}).text()
    assert "  where  the forward pass\n" in text


def test_json_has_nine_keys_and_survives_a_round_trip():
    found = finding("GS208", where="a.weight", cause="backward-op").as_dict()
    assert json.loads(json.dumps(found)) == {
        "code": "GS208",
        "cause": "backward-op",
        "where": "a.weight",
        "step": 10,
        "since": 4,
        "what": "it happened",
        "cost": "6 batches lost",
        "evidence": {"since": 4, "loss_finite": True, "depth": 8.25},
        "advice": ["First.", "Then."],
    }


@pytest.mark.parametrize(
    ("findings", "health", "exit_code"),
    [
        ([], "healthy", 0),
        ([NORMAL], "healthy", 0),
        ([NORMAL, finding("GS210")], "findings", 1),
        ([finding("GS210"), finding("GS203", hopeless=True)], "collapse", 2),
    ],
)
def test_a_run_is_summed_up_in_a_word_and_an_exit_code(findings, health, exit_code):
    assert str(Health.of(findings)) == health
    assert Health.of(findings).exit_code == exit_code


def test_what_is_hopeless_comes_first():
    severe, mild = finding("GS202", hopeless=True), finding("GS203")
    assert by_severity([mild, severe]) == [severe, mild]


def test_a_wrong_use_of_the_scaler_comes_before_what_it_may_have_caused():
    wrong, severe = finding("GS116"), finding("GS208", hopeless=True)
    assert by_severity([severe, wrong]) == [wrong, severe]


def test_a_finding_with_a_cause_comes_before_one_without():
    known, unknown = finding("GS210", cause="learning-rate"), finding("GS203")
    assert by_severity([unknown, known]) == [known, unknown]


def test_float16_nowhere_is_no_wrong_use():
    assert by_severity([finding("GS121"), finding("GS203")])[0].code == "GS203"


def test_a_cause_comes_before_what_follows_from_it():
    found = [finding(code, hopeless=True) for code in ("GS202", "GS203", "GS207")]
    assert [f.code for f in by_severity(found)] == ["GS207", "GS203", "GS202"]


def test_a_code_without_a_rank_comes_before_what_is_normal():
    found = [NORMAL, finding("GS301"), finding("GS103")]
    assert [f.code for f in by_severity(found)] == ["GS103", "GS301", "GS001"]


def test_of_equals_the_one_that_began_first_comes_first():
    found = [finding("GS210", since=9), finding("GS210", since=3)]
    assert [f.since for f in by_severity(found)] == [3, 9]


def test_every_code_with_a_rank_is_in_the_catalogue():
    assert set(SEVERITY) <= set(BY_CODE)
    assert len(set(SEVERITY)) == len(SEVERITY)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (2.0**24, "2^24"),
        (1.0, "2^0"),
        (2.0**-24, "2^-24"),
        (1000.0, "1000"),
        (0.0, "0"),
        (float("inf"), "inf"),
    ],
)
def test_a_scale_is_written_as_people_say_it(scale, text):
    assert power(scale) == text


def repeated(
    code="GS203", where="", step=10, since=4, hopeless=False, cause="", **evidence
):
    """Return a finding with this evidence alone."""
    fields = {"where": where, "since": since, "evidence": evidence, "cause": cause}
    return finding(code, step, hopeless, **fields)


@pytest.mark.parametrize(("healthy", "hopeless"), [(0, True), (10, True), (11, False)])
def test_a_finding_is_hopeless_no_longer_once_the_run_has_recovered(healthy, hopeless):
    (after,) = clear_recovered([repeated(step=10, hopeless=True, nan=True)], healthy)
    assert after.hopeless == hopeless
    assert after.evidence == {"nan": True} | ({} if hopeless else {"mended": True})


def test_a_finding_that_is_not_hopeless_is_left_unchanged():
    assert clear_recovered([repeated()], 20) == [repeated()]


def test_findings_of_different_codes_or_locations_are_not_merged():
    found = [repeated(), repeated("GS208"), repeated(where="a"), repeated(where="b")]
    assert merge_repeats(found) == found


def test_of_findings_that_count_all_occurrences_the_last_with_a_cause_is_kept():
    first = repeated("GS211", step=10, since=4, cause="bad-batch", where="the batch")
    located = repeated("GS211", step=30, since=4, cause="backward-op", where="head")
    unknown = repeated("GS211", step=40, since=4, cause="", where="")
    (one,) = merge_repeats([first, located, unknown])
    assert (one.cause, one.where, one.since) == ("backward-op", "head", 4)


def test_findings_of_one_cause_and_location_are_merged_whatever_their_codes():
    first = repeated("GS211", step=10, since=4, cause="bad-batch", where="the batch")
    last = repeated("GS203", step=30, since=28, cause="bad-batch", where="the batch")
    (one,) = merge_repeats([first, last])
    assert (one.code, one.step, one.since) == ("GS203", 30, 4)
    assert one.what == "it happened"


def test_findings_of_one_code_and_different_causes_are_not_merged():
    found = [repeated(cause="bad-batch"), repeated(cause="learning-rate")]
    assert merge_repeats(found) == found


def test_findings_of_one_code_and_location_are_merged_with_count_and_steps():
    found = [repeated(step=10, since=4), repeated(step=30, since=28, loss="nan")]
    (one,) = merge_repeats(found)
    assert (one.step, one.since) == (30, 4)
    assert one.what == "it happened; reported twice (steps 10 and 30)"
    assert one.evidence == {
        "loss": "nan",
        "times": 2,
        "first_step": 10,
        "last_step": 30,
    }


def test_a_count_in_the_evidence_wins_over_the_number_of_findings():
    found = [repeated(times=1), repeated(times=2), repeated(times=8)]
    (one,) = merge_repeats(found)
    assert one.evidence["times"] == 8
    assert one.what == "it happened; 8 times (steps 10 to 10)"


def test_the_hopeless_finding_of_a_group_is_kept():
    found = [repeated(step=10), repeated(step=20, hopeless=True), repeated(step=30)]
    (one,) = merge_repeats(found)
    assert (one.step, one.hopeless) == (20, True)
    assert (one.evidence["first_step"], one.evidence["last_step"]) == (10, 30)
