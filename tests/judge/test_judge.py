"""The judge says the right thing once, in time, and nothing of healthy runs."""

import math

import pytest

from gradscale import StepRecord, Verdict
from gradscale.judge.judge import Judge
from tests.judge.histories import dynamic, healthy
from tests.judge.judged import codes, falling, findings_of, renumbered, verdicts_of
from tests.judge.sick_runs import (
    BAD,
    GOOD,
    PATTERNS,
    a_layer_gets_no_gradients,
    gradients_are_nan_now_and_then,
    gradients_grew_since_the_first_steps,
    losses_and_gradients_fail_by_turns,
)

LOST = BAD._replace(loss_finite=False)
# The loss is not finite, and the step is applied.
USELESS = GOOD._replace(loss_finite=False)

each_pattern = pytest.mark.parametrize(
    "pattern", PATTERNS, ids=lambda pattern: pattern.records.__name__
)


@each_pattern
def test_a_sick_run_is_found_with_its_own_code(pattern):
    assert codes(findings_of(pattern.records(True))) == pattern.sick


@each_pattern
def test_the_healthy_twin_is_left_alone(pattern):
    assert codes(findings_of(pattern.records(False))) == pattern.well


@each_pattern
def test_a_sick_run_is_found_in_time(pattern):
    assert findings_of(pattern.records(True))[-1].step == pattern.by


@each_pattern
def test_only_what_no_scale_can_mend_is_hopeless(pattern):
    found = findings_of(pattern.records(True))
    assert any(finding.hopeless for finding in found) == pattern.hopeless


@pytest.mark.parametrize(
    ("init", "line"),
    [
        (24, "GS001 calibrated: S 2^24 -> 2^15 after 9 skips (normal)"),
        (32, "GS001 calibrated: S 2^32 -> 2^15 after 17 skips (normal)"),
        (16, "GS001 calibrated: S 2^16 -> 2^15 after 1 skip (normal)"),
    ],
)
def test_a_healthy_run_of_5000_steps_is_one_line(init, line):
    found = findings_of(dynamic([15.5] * 5000, init=init, interval=500))
    assert [finding.text() for finding in found] == [line]


def test_a_run_that_fits_from_the_start_says_nothing():
    assert findings_of(dynamic([17.0] * 5000, init=16)) == []


def test_a_fixed_scale_is_not_called_calibrated():
    early = BAD._replace(calibrated=False)
    assert findings_of(renumbered([early, *[GOOD] * 100])) == []


def test_a_resumed_run_has_no_start_to_speak_of():
    assert findings_of(dynamic([14.5] * 100, init=16, first=5000)) == []


def test_overflows_among_the_first_finite_steps_still_belong_to_the_start():
    safe = [30.0, 14.5, 30.0, 14.5, *[15.5] * 100]
    (finding,) = findings_of(dynamic(safe, init=17))
    assert finding.text() == "GS001 calibrated: S 2^17 -> 2^15 after 2 skips (normal)"


def test_skips_before_the_run_has_settled_are_calibration():
    safe = [30.0, 14.5, 30.0, 14.5, *[15.5] * 20]
    seen = verdicts_of(dynamic(safe, init=17))
    assert [v for v in seen if v is not Verdict.OK] == [Verdict.CALIBRATING] * 2


def test_an_overflow_after_a_start_without_one_is_not_calibration():
    spoilt = list(dynamic([*[17.0] * 4, -math.inf, *[17.0] * 30], init=16))
    assert findings_of(spoilt) == []
    assert verdicts_of(spoilt)[4] is Verdict.OVERFLOW


def test_a_run_that_never_settles_is_not_calibrating_for_ever():
    flags = [GOOD, GOOD._replace(scale=2.0**15), BAD] * 60
    seen = verdicts_of(
        record._replace(calibrated=record.step > 1) for record in renumbered(flags)
    )
    assert seen[2] is Verdict.CALIBRATING
    assert seen[-1] is Verdict.OVERFLOW


def test_probing_stays_probing():
    seen = verdicts_of(dynamic([16.5] * 60, init=16, interval=20))
    assert [v for v in seen if v is not Verdict.OK] == [Verdict.PROBING] * 2


def test_trouble_is_told_once_down_to_the_floor():
    records = dynamic([17.0] * 100 + [-math.inf] * 100)
    assert codes(findings_of(records)) == ("GS208",)


@pytest.mark.parametrize(("good", "times"), [(4, 1), (5, 2)])
def test_trouble_that_returns_after_five_good_steps_is_told_again(good, times):
    records = renumbered([*[LOST] * 12, *[GOOD] * good, *[LOST] * 12])
    assert codes(findings_of(records)) == ("GS203",) * times


def test_losses_and_gradients_that_fail_by_turns_are_one_episode():
    (finding,) = findings_of(losses_and_gradients_fail_by_turns(True))
    assert (finding.since, finding.step, finding.hopeless) == (100, 109, True)
    assert (finding.evidence["steps"], finding.evidence["of"]) == (10, 10)
    assert "in 5 of 10 steps" in finding.what


def test_two_losses_among_bad_gradients_do_not_make_it_hopeless():
    bad = [*[BAD] * 4, LOST, *[BAD] * 4, LOST, BAD]
    (finding,) = findings_of(renumbered([*[GOOD] * 20, *bad, *[GOOD] * 5]))
    assert (finding.step, finding.hopeless) == (36, False)


def test_a_loss_whose_location_is_known_is_hopeless_two_steps_earlier():
    judge = Judge()
    judge.observe(24, {"found": True, "direction": "forward", "module": "head"})
    (finding,) = findings_of(renumbered([*[GOOD] * 20, *[LOST] * 12]), judge)
    assert (finding.step, finding.where) == (28, "head")


def test_losses_under_which_steps_are_taken_are_never_hopeless():
    (finding,) = findings_of(renumbered([*[GOOD] * 20, *[USELESS] * 200]))
    assert (finding.code, finding.step, finding.hopeless) == ("GS203", 28, False)


def test_skips_among_losses_under_which_steps_are_taken_are_not_added_up():
    records = renumbered([*[GOOD] * 20, *([LOST] * 9 + [USELESS]) * 9])
    assert [f.hopeless for f in findings_of(records)] == [False]


def test_losses_under_which_steps_are_taken_no_more_become_hopeless():
    records = renumbered([*[GOOD] * 20, *[USELESS] * 9, *[LOST] * 20])
    assert [(f.step, f.hopeless) for f in findings_of(records)] == [
        (28, False),
        (39, True),
    ]


def test_losses_that_are_said_to_be_of_no_use_are_not_said_to_be_over():
    records = renumbered([*[GOOD] * 20, *[USELESS] * 9, *[GOOD] * 20])
    assert [f.step for f in findings_of(records)] == [28]


def test_a_run_was_well_when_ten_steps_in_a_row_were_finite():
    judge = Judge()
    records = [*[BAD] * 5, *[GOOD] * 9, BAD, *[GOOD] * 12, *[BAD] * 3]
    findings_of(renumbered(records[:15]), judge)
    assert judge.healthy_at == 0
    findings_of(renumbered(records)[15:], judge)
    assert judge.healthy_at == 27


def test_poisoned_batches_are_told_at_the_1st_2nd_4th_and_8th_time():
    records = renumbered([*[GOOD] * 20, *([LOST] + [GOOD] * 20) * 15])
    assert [f.step for f in findings_of(records)] == [26, 47, 89, 173]


def test_a_batch_that_fails_every_8_steps_is_a_bad_batch():
    records = renumbered([*[GOOD] * 20, *([LOST] + [GOOD] * 7) * 6])
    *_, finding = findings_of(records)
    assert (finding.cause, finding.where) == ("bad-batch", "the batch")
    assert (finding.evidence["every"], finding.evidence["times"]) == (8, 4)
    assert finding.what.endswith("because the same batch fails every 8 steps")


def test_gradients_that_fail_every_8_steps_at_any_scale_are_a_bad_batch():
    safe = [31.0] * 50
    safe[20::8] = [-math.inf] * 4
    (finding,) = findings_of(r._replace(nan=not r.finite) for r in dynamic(safe))
    assert (finding.code, finding.cause, finding.evidence["every"]) == (
        *("GS211", "bad-batch", 8),
    )


@pytest.mark.parametrize(
    ("last", "nan", "found"), [(80, True, 1), (81, True, 0), (80, False, 0)]
)
def test_regular_nan_without_headroom_is_a_bad_batch(last, nan, found):
    safe = [18.0] * 100
    for step in (20, 40, 60, last):
        safe[step] = -math.inf
    seen = findings_of(r._replace(nan=nan and not r.finite) for r in dynamic(safe))
    assert [each.cause for each in seen] == ["bad-batch"] * found
    assert [each.evidence["every"] for each in seen] == [20] * found


def test_regular_nan_after_each_growth_is_the_scale():
    records = dynamic([16.0] * 400, interval=20)
    assert findings_of(r._replace(nan=not r.finite) for r in records) == []


def test_batches_that_fail_at_odd_distances_are_not_called_the_same_batch():
    gaps = (9, 12, 8, 15, 10, 11)
    records = [record for gap in gaps for record in (LOST, *[GOOD] * gap)]
    *_, finding = findings_of(renumbered([*[GOOD] * 20, *records]))
    assert (finding.cause, finding.evidence["every"]) == ("bad-batch", 0)
    assert finding.what.endswith("because of single batches")


def test_gradients_that_fail_with_headroom_say_what_the_scale_lost_for_it():
    *_, finding = findings_of(gradients_are_nan_now_and_then(True))
    seen = finding.evidence
    assert (seen["scale_from"], seen["scale"], seen["bits"]) == ("2^16", "2^10", 6.0)
    assert finding.cost == "6 batches lost; S fell by 6 bits for nothing"
    assert "with 16 bits of headroom: the scale is not the cause" in finding.what


def test_gradients_that_fail_twice_with_headroom_acquit_no_scale():
    safe = [-math.inf if step in (40, 80) else 31.0 for step in range(200)]
    records = (r._replace(nan=not r.finite) for r in dynamic(safe))
    assert findings_of(records) == []


def test_gradients_that_fail_at_one_scale_alone_acquit_no_scale():
    bad = BAD._replace(nan=True)
    assert findings_of(renumbered([*[GOOD] * 30, *[bad, *[GOOD] * 30] * 6])) == []


def test_a_fall_of_the_scale_that_was_acquitted_is_no_falling_scale():
    safe = [31.0] * 400
    safe[210:350:12] = [-math.inf] * 12
    records = (r._replace(nan=not r.finite) for r in dynamic(safe))
    assert {f.code for f in findings_of(records)} == {"GS211"}


def test_gradients_that_grew_since_the_first_steps_are_named_with_both_scales():
    (finding,) = findings_of(gradients_grew_since_the_first_steps(True))
    assert (finding.cause, finding.since) == ("gradient-growth", 1)
    assert finding.what == (
        "S fell from 2^16 to 2^9, because gradients have grown by 6 bits"
    )


def test_a_layer_without_gradients_is_named_with_the_scale_that_has_room():
    (finding,) = findings_of(a_layer_gets_no_gradients(True))
    assert (finding.cause, finding.where) == ("scale-too-low", "head.weight")
    assert finding.since == 50
    assert finding.advice[0].endswith("raise the scale from 2^16 to 2^23.")


def test_a_layer_is_named_after_four_samples_of_its_own():
    layers = "ababaaabbb"
    samples = [GOOD._replace(lost=0.0, lost_layer=name) for name in layers]
    assert findings_of(renumbered(samples)) == []


NOTHING = GOOD._replace(
    scale=1.0, amax=0.0, lost=0.0, lost_layer="head.weight", loss=0.5
)


def test_gradients_that_are_all_0_at_a_low_scale_are_reported_without_a_layer():
    (finding,) = findings_of(renumbered([NOTHING] * 6))
    assert (finding.code, finding.step, finding.since) == ("GS209", 4, 1)
    assert finding.what == "every gradient is exactly 0 at S = 2^0"
    assert finding.where == ""


@pytest.mark.parametrize(
    "change", [{"loss": 0.0}, {"loss": None}, {"scale": 2.0**16}, {"amax": 0.25}]
)
def test_gradients_that_are_all_0_need_a_loss_and_a_low_scale(change):
    assert findings_of(renumbered([NOTHING._replace(**change)] * 6)) == []


def test_scalers_created_repeatedly_are_reported_without_their_calibrations():
    judge, found = Judge(), []
    for number, record in enumerate(renumbered([*[BAD] * 8, GOOD, GOOD] * 20), 1):
        if number % 10 == 1 and number > 1:
            data = {"observed": "scaler", "same_optimizer": True}
            judge.observe(number, data)
        found += judge.see(record._replace(calibrated=False)).findings
    assert "GS118" in codes(found)
    assert not {"GS201", "GS205"} & {*codes(found)}
    (anew,) = [each for each in found if each.code == "GS118"]
    assert anew.what.startswith("2 new scalers were made")
    assert judge.up_to_now(anew).what.startswith("19 new scalers")
    assert judge.up_to_now(anew).step == anew.step


def test_a_run_that_ends_with_a_loss_that_is_not_finite_says_so():
    judge = Judge()
    for record in renumbered([*[GOOD] * 20, *[LOST] * 3]):
        assert judge.see(record).findings == ()
    (finding,) = judge.end()
    assert (finding.code, finding.step, finding.since) == ("GS203", 23, 21)
    assert not finding.hopeless
    assert judge.end() == (finding,)


def test_a_run_that_ends_in_trouble_is_not_told_twice():
    assert codes(findings_of(renumbered([LOST] * 11))) == ("GS203",)


def test_a_scale_that_fell_for_a_loss_is_no_falling_scale():
    losses = [*[2.0] * 1000, *[math.nan] * 6, *[2.0] * 500]
    records = dynamic([17.0] * len(losses), losses=losses)
    assert codes(findings_of(records)) == ("GS203",)


def test_steps_without_gradients_do_not_break_a_row():
    idle = GOOD._replace(read=False, applied=False)
    (finding,) = findings_of(renumbered([*[GOOD] * 20, *[LOST, idle] * 10]))
    assert (finding.code, finding.step) == ("GS203", 39)


def test_now_and_then_a_branch_without_gradients_is_normal():
    idle = GOOD._replace(read=False, applied=False)
    assert findings_of(renumbered([*[idle] * 9, GOOD] * 5)) == []


def test_skips_that_end_are_told_again_when_they_return():
    crowd = [GOOD, GOOD, BAD._replace(scale=2.0**15), GOOD, GOOD, BAD]
    calm = [GOOD] * 300
    records = renumbered([*calm, *crowd * 20, *calm, *crowd * 20])
    assert codes(findings_of(records)) == ("GS201", "GS201")


def test_gradients_that_vanish_are_told_once():
    tiny = GOOD._replace(scale=1.0, amax=2.0**-20)
    assert codes(findings_of(renumbered([tiny] * 1000))) == ("GS209",)


def test_gradients_that_vanish_in_rows_broken_by_a_skip_are_not_told():
    tiny = GOOD._replace(amax=2.0**-20)
    assert findings_of(renumbered([*[tiny] * 60, BAD, *[tiny] * 60])) == []


def test_gradients_that_are_all_zero_are_told_if_the_norm_says_so():
    zero = GOOD._replace(amax=0.0, grad_norm=0.0)
    assert codes(findings_of(renumbered([zero] * 100))) == ("GS209",)


def test_an_amax_that_nobody_read_is_no_underflow():
    assert findings_of(renumbered([GOOD._replace(amax=0.0)] * 1000)) == []


def test_the_verdict_says_underflow_while_gradients_vanish():
    tiny = GOOD._replace(scale=1.0, amax=2.0**-20)
    assert verdicts_of(renumbered([tiny] * 100))[98:] == [Verdict.OK, Verdict.UNDERFLOW]


def test_the_first_culprit_is_where():
    judge = Judge(tensors=211)
    names = ("decoder.3.ffn.wo.weight", "decoder.3.ffn.wi.weight")
    (finding,) = findings_of(falling(8, nan=True), judge, names)
    assert finding.where == "decoder.3.ffn.wo.weight"
    assert finding.evidence["culprits"] == 2
    assert finding.evidence["tensors"] == 211


def test_a_finding_prints_what_where_since_cost_advice_and_the_command():
    (finding,) = findings_of(falling(8, nan=True), Judge(tensors=211), ("a.weight",))
    assert finding.text() == (
        "GS208 step 59: gradients are NaN at any scale: S 2^16 -> 2^8, 9 of 9 steps "
        "skipped\n"
        "  where  a.weight\n"
        "  since  step 51\n"
        "  seen   NaN gradients; 9 of 9 steps lost; S fell by 8 bits from 2^16 to "
        "2^8; gradients 2 bits below 65504; 1 of 211 tensors not finite, first "
        "a.weight\n"
        "  cost   no step was applied; 9 batches lost\n"
        "  try 1  Run the module of a.weight in float32.\n"
        "  try 2  NaN gradients of a finite loss come from an undefined derivative: a "
        "root, a norm or a power at 0, 0/0, a mask of infinity. Keep the argument away "
        "from 0 before the operation, not after it.\n"
        "  more   gradscale explain GS208"
    )


# --- Observations ---------------------------------------------------------------------

DIRECT = {"observed": "loop", "looks": 1, "direct_steps": 1}


def test_a_wrong_use_is_reported_once_at_the_step_of_its_observation():
    judge = Judge()
    for step in (5, 6, 7):
        judge.observe(step, DIRECT)
    (finding,) = findings_of(renumbered([GOOD] * 20), judge)
    assert (finding.code, finding.step, finding.since) == ("GS115", 5, 5)


def test_an_observation_of_an_earlier_step_may_arrive_later():
    judge = Judge()
    judge.observe(9, {"observed": "setup", "float16": False})
    judge.observe(5, DIRECT)
    found = findings_of(renumbered([GOOD] * 20), judge)
    assert [(f.code, f.step) for f in found] == [("GS115", 5), ("GS121", 9)]


def test_a_wrong_use_is_reported_in_steps_without_gradients_too():
    judge = Judge()
    judge.observe(3, {"observed": "loop", "looks": 3, "cleared_early": 3})
    idle = GOOD._replace(read=False, applied=False, amax=0.0)
    found = findings_of(renumbered([idle] * 20), judge)
    assert [(f.code, f.step) for f in found] == [("GS117", 3), ("GS103", 10)]


def test_a_wrong_use_observed_after_the_last_step_is_reported_at_the_end():
    judge = Judge()
    judge.observe(21, {"observed": "end", "unused_losses": 4})
    assert [judge.see(r).findings for r in renumbered([GOOD] * 20)] == [()] * 20
    assert [(f.code, f.step) for f in judge.end()] == [("GS123", 20)]


FORWARD = {
    "found": True,
    "direction": "forward",
    "module": "in",
    "tensor": "output",
    "kind": "inf",
    "loss_finite": True,
    "peak": 1e6,
    "given_peak": 1e6,
}


@pytest.mark.parametrize(
    ("direction", "found"), [("forward", ("GS211",)), ("backward", ())]
)
def test_a_value_that_the_forward_pass_made_acquits_the_scale(direction, found):
    bad = GOOD._replace(applied=False, finite=False, nan=True, amax=math.nan)
    good = GOOD._replace(amax=2.0**15)
    judge = Judge()
    judge.observe(21, {**FORWARD, "direction": direction})
    findings = findings_of(renumbered([*[good] * 20, bad, *[good] * 5]), judge)
    assert codes(findings) == found
    assert all(f.cause == "input-range" for f in findings)
    assert all("the scale is not the cause" in f.what for f in findings)


# --- Any record -----------------------------------------------------------------------


def test_a_scale_of_0_or_infinity_is_judged_without_complaint():
    judge = Judge()
    for scale in (0.0, math.inf, math.nan, 5e-324):
        record = StepRecord(step=1, scale=scale, applied=False, finite=False)
        assert judge.see(record).verdict is Verdict.OVERFLOW


def test_healthy_noise_of_a_recorded_run_is_no_finding():
    records = dynamic(healthy("vit", seed=7, steps=5000), init=24)
    assert codes(findings_of(records)) == ("GS001",)
