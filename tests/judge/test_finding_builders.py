"""The evidence of a finding is what the run showed."""

import math

import pytest

from gradscale.judge.judge import Judge
from tests.judge import histories
from tests.judge.histories import dynamic
from tests.judge.judged import falling
from tests.judge.sick_runs import BAD, GOOD


def found(code, records, culprits=(), tensors=0):
    """Return the last finding of one code."""
    judge = Judge(tensors=tensors)
    findings = [
        finding
        for step, record in enumerate(records, start=1)
        for finding in judge.see(
            record._replace(step=step), () if record.finite else culprits
        ).findings
    ]
    return [finding for finding in findings if finding.code == code][-1]


def evidence(*arguments, **fields):
    return found(*arguments, **fields).evidence


LOST = BAD._replace(loss_finite=False)
TINY = GOOD._replace(amax=2.0**-20)


@pytest.mark.parametrize(
    ("loss", "word"), [(math.nan, "nan"), (math.inf, "inf"), (None, "not finite")]
)
def test_a_loss_is_called_by_its_name(loss, word):
    seen = evidence("GS203", [GOOD] * 20 + [LOST._replace(loss=loss)] * 10)
    assert seen["loss"] == word


@pytest.mark.parametrize(
    ("loss", "word"),
    [(math.nan, "NaN"), (math.inf, "infinite"), (None, "not finite")],
)
def test_the_text_on_a_loss_is_the_same_whether_or_not_the_run_recovered(loss, word):
    records = [*[GOOD] * 20, LOST._replace(loss=loss), *[GOOD] * 5]
    judge = Judge()
    for step, record in enumerate(records, start=1):
        if step == 25:
            (open_at_the_end,) = judge.end()
        found = judge.see(record._replace(step=step)).findings
    (recovered,) = found
    assert recovered.evidence["recovered"] is True
    assert "recovered" not in open_at_the_end.evidence
    text = f"the loss is {word} before scaling, 1 step; no lower scale can help"
    assert open_at_the_end.what == text
    assert recovered.what == f"{text}, because of single batches"


@pytest.mark.parametrize("before", [0, 20])
def test_a_loss_was_finite_before_or_never(before):
    seen = evidence("GS203", [GOOD] * before + [LOST] * 10)
    assert seen["finite_before"] == (before > 0)


def test_a_step_that_was_not_taken_is_none_before():
    assert not evidence("GS203", [BAD, BAD] + [LOST] * 10)["finite_before"]


@pytest.mark.parametrize(
    ("taken", "cost"),
    [
        (0, "7 batches lost"),
        (3, "4 batches lost; 3 of 7 steps were applied"),
        (7, "the value of the loss is unusable; the steps were applied"),
    ],
)
def test_a_loss_costs_the_batches_whose_steps_were_not_taken(taken, cost):
    useless = GOOD._replace(loss_finite=False)
    losses = [useless] * taken + [LOST] * (7 - taken)
    finding = found("GS203", [*[GOOD] * 20, *losses, *[GOOD] * 5])
    assert (finding.cost, finding.evidence["applied"]) == (cost, taken)


def test_a_loss_says_what_the_scale_did_meanwhile():
    records = dynamic([17.0] * 20, losses=[2.0] * 10 + [math.nan] * 10)
    seen = evidence("GS203", records)
    assert (seen["scale_from"], seen["scale"], seen["steps"]) == ("2^16", "2^7", 10)
    assert seen["bits"] == 9.0


@pytest.mark.parametrize(
    ("loss", "fits"), [(3.5, "2^14"), (-3.5, "2^14"), (100.0, "2^9"), (1e-3, "2^25")]
)
def test_a_scaled_loss_names_the_scale_that_fits(loss, fits):
    overflowed = BAD._replace(scaled_loss_finite=False, loss=loss)
    seen = evidence("GS206", [overflowed])
    assert (seen["value"], seen["fits"]) == (loss, fits)


@pytest.mark.parametrize(
    ("loss", "scale", "above", "fits"),
    [
        (3.5, 2.0**16, False, "2^14"),
        (3.5, 2.0**126, False, "2^14"),
        (4.0, 2.0**126, True, "2^126"),
        (1e30, 2.0**32, True, "2^28"),
    ],
)
def test_a_product_above_the_largest_float32_is_told_from_one_of_float16(
    loss, scale, above, fits
):
    overflowed = BAD._replace(scaled_loss_finite=False, loss=loss, scale=scale)
    seen = evidence("GS206", [overflowed])
    assert (seen["above_float32"], seen["fits"]) == (above, fits)


@pytest.mark.parametrize("loss", [None, 0.0, math.nan])
def test_a_loss_that_says_nothing_names_no_scale(loss):
    overflowed = BAD._replace(scaled_loss_finite=False, loss=loss)
    assert "fits" not in evidence("GS206", [overflowed])


@pytest.mark.parametrize("first", [2.0**16, 2.0**18])
def test_an_underflow_says_whether_the_scale_has_fallen(first):
    records = [GOOD._replace(scale=first), *[TINY] * 100]
    assert evidence("GS209", records)["fallen"] == (first > 2.0**16)


@pytest.mark.parametrize(
    ("scale", "lost", "perhaps"),
    [(2.0**16, None, True), (1.0, None, False), (2.0**16, 0.4, False)],
    ids=["high scale", "low scale", "sampled"],
)
def test_tiny_gradients_at_a_high_scale_are_perhaps_not_scaled(scale, lost, perhaps):
    records = [TINY._replace(scale=scale, lost=lost)] * 100
    assert ("perhaps_unscaled" in evidence("GS209", records)) == perhaps


def test_an_underflow_leaves_two_bits_of_headroom_free():
    seen = evidence("GS209", [TINY._replace(scale=1.0)] * 100)
    assert seen["headroom_bits"] == pytest.approx(36.0, abs=0.01)
    assert seen["room"] == "2^33"


def test_an_underflow_without_headroom_names_the_scale_it_has():
    full = GOOD._replace(lost=0.5, amax=50_000.0)
    seen = evidence("GS209", [full] * 3)
    assert (seen["room"], seen["lost"]) == ("2^16", 0.5)


def test_a_sample_says_its_share():
    assert found("GS209", [GOOD._replace(lost=0.41)] * 3).what == (
        "about 41 % of the gradient elements are too small for float16 at S = 2^16"
    )


def test_a_collapse_began_with_its_episode_and_names_when_all_was_usual():
    collapse = found("GS202", histories.opt_175b())
    assert (collapse.step, collapse.since) == (3_908, 3_898)
    assert collapse.evidence["usual_before"] == 3_021


def test_a_collapse_that_came_at_once_began_with_its_first_skip():
    floor = [BAD._replace(scale=2.0**-24, floor_steps=steps) for steps in (1, 2, 3)]
    assert found("GS202", [GOOD] * 20 + floor).since == 21


def test_a_loss_that_soared_says_from_where_and_to_where():
    losses = [8.0, 6.0, 300.0, 6795.0, 1625.0]
    records = [GOOD._replace(loss=loss) for loss in losses] + [LOST] * 10
    seen = evidence("GS203", records)
    assert (seen["loss_start"], seen["loss_last"]) == (8.0, 1625.0)
    assert "usual_before" not in seen


def test_a_loss_that_rose_says_where_it_began():
    records = [GOOD._replace(loss=loss) for loss in [9.0, *[2.0] * 60, *[6.0] * 40]]
    assert evidence("GS203", records + [LOST] * 10)["loss_start"] == 9.0


@pytest.mark.parametrize(("culprits", "where"), [(2, "a"), (3, "a"), (4, ""), (5, "")])
def test_where_most_tensors_are_hit_the_first_is_no_place(culprits, where):
    nan = falling(8, nan=True)
    finding = found("GS208", nan, tuple("abcde"[:culprits]), tensors=5)
    assert (finding.where, finding.evidence["culprit"]) == (where, "a")


def test_a_scale_that_is_too_high_is_located_in_the_first_tensor_of_all():
    finding = found("GS205", [BAD] * 10, tuple("abcde"), tensors=5)
    assert (finding.cause, finding.where) == ("scale-too-high", "a")


def test_where_the_number_of_tensors_is_not_known_the_first_is_the_place():
    assert found("GS205", [BAD] * 10, ("a", "b")).where == "a"


def test_a_collapse_under_a_bad_loss_is_in_no_tensor():
    floor = [LOST._replace(scale=2.0**-24, floor_steps=steps) for steps in (1, 2, 3)]
    finding = found("GS202", [GOOD] * 20 + floor, ("a",), tensors=9)
    assert finding.where == ""
    assert "culprit" not in finding.evidence
    assert "  where  the forward pass\n" in finding.text()


@pytest.mark.parametrize(
    ("headroom", "cause"), [(5.9, "scale-too-high"), (6.1, "")], ids=["near", "far"]
)
def test_a_collapse_close_to_the_limit_is_blamed_on_the_scale(headroom, cause):
    near = GOOD._replace(scale=1.0, amax=65504.0 * 2.0**-headroom)
    floor = [BAD._replace(scale=1.0, floor_steps=steps) for steps in (1, 2, 3)]
    finding = found("GS202", [near] * 20 + floor)
    assert finding.cause == cause
    assert finding.evidence.get("at_floor", False) is bool(cause)


def test_a_collapse_after_a_fall_by_eight_bits_is_not_blamed_on_the_scale():
    falling_down = [
        BAD._replace(scale=2.0 ** max(8, 15 - n), floor_steps=max(0, n - 6))
        for n in range(10)
    ]
    finding = found("GS202", [GOOD] * 20 + falling_down)
    assert (finding.evidence["bits"], finding.cause) == (8.0, "")


@pytest.mark.parametrize(
    ("kinds", "word"), [("nnn", "NaN"), ("ini", "NaN or infinite"), ("iii", "infinite")]
)
def test_a_collapse_says_what_gradients_were(kinds, word):
    floor = [
        BAD._replace(floor_steps=steps, nan=kind == "n")
        for steps, kind in enumerate(kinds, start=1)
    ]
    assert f"gradients are still {word}, 3 steps" in found("GS202", floor).what


def test_a_loss_that_followed_a_fall_says_when_all_was_usual():
    seen = found("GS203", histories.bigscience_104b()).evidence
    assert (seen["usual_before"], seen["since"]) == (5_168, 7_220)
    assert (seen["loss_low"], seen["loss_mean"]) == pytest.approx(
        (6.44, 11.4), abs=1e-3
    )


def test_trends_that_are_none_are_not_mentioned():
    seen = evidence("GS203", [GOOD._replace(loss=2.0)] * 500 + [LOST] * 10)
    assert not {"loss_low", "gradients_grown_bits", "usual_before"} & set(seen)


def test_gradients_that_grew_are_measured_in_bits():
    calm = [GOOD] * 300
    grown = [GOOD._replace(amax=GOOD.amax * 16.0)] * 60
    seen = evidence("GS203", [*calm, *grown, *[LOST] * 10])
    assert 2.5 < seen["gradients_grown_bits"] < 4.0


def test_too_many_skips_say_whether_the_scale_holds_its_place():
    crowd = [GOOD, BAD._replace(scale=2.0**15), BAD]
    assert evidence("GS201", [*[GOOD] * 300, *crowd * 30])["falling"] is False
    low = [record._replace(scale=record.scale / 8.0) for record in crowd]
    assert evidence("GS201", [*[GOOD] * 300, *low * 30])["falling"] is True


def test_too_many_skips_say_whether_the_scale_is_at_its_floor():
    crowd = [GOOD, BAD._replace(scale=2.0**15), BAD._replace(floor_steps=1)]
    assert evidence("GS201", [*[GOOD] * 300, *crowd * 30])["at_floor"] is True


def test_weights_say_how_many_steps_came_before():
    ruined = BAD._replace(weights_finite=False)
    assert evidence("GS207", [ruined])["steps_before"] == 0
    assert evidence("GS207", [GOOD] * 7 + [ruined])["steps_before"] == 7


def test_missing_gradients_say_whether_there_were_any():
    idle = GOOD._replace(read=False, applied=False)
    assert evidence("GS103", [idle] * 10)["gradients_before"] is False
    assert evidence("GS103", [GOOD] + [idle] * 10)["gradients_before"] is True


def test_culprits_of_an_earlier_skip_are_not_blamed_for_a_later_one():
    judge = Judge()
    judge.see(BAD._replace(step=1), ("a.weight",))
    overflowed = BAD._replace(step=2, weights_finite=False)
    (finding,) = judge.see(overflowed).findings
    assert finding.where == ""


def test_the_number_of_tensors_is_told_if_it_is_known():
    ruined = BAD._replace(weights_finite=False)
    seen = evidence("GS207", [ruined], culprits=("a", "b"), tensors=9)
    assert (seen["culprit"], seen["culprits"], seen["tensors"]) == ("a", 2, 9)
    assert "tensors" not in evidence("GS207", [ruined], culprits=("a", "b"))


def test_an_alarm_on_headroom_says_how_much_is_left():
    sizes = [5.0] * 300 + [5.0 + step / 10.0 for step in range(90)] + [14.0] * 40
    records = [GOOD._replace(amax=2.0**size) for size in sizes]
    seen = evidence("GS210", records)
    assert (seen["signal"], seen["bits"] >= 4.0) == ("headroom", True)
    assert 2.0 < seen["headroom_bits"] <= 3.0
