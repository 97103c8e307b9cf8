"""The judge says the right thing once, in time, and nothing of healthy runs."""

import math

import pytest

from gradscale import StepRecord, Verdict
from gradscale.judge.judge import Judge
from tests.judge.histories import dynamic, healthy
from tests.judge.judged import codes, falling, findings_of, renumbered, verdicts_of
from tests.judge.sick_runs import BAD, GOOD, PATTERNS

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


def test_trouble_that_returns_after_ten_good_steps_is_told_again():
    lost = BAD._replace(loss_finite=False)
    records = renumbered([*[lost] * 12, *[GOOD] * 10, *[lost] * 12])
    assert codes(findings_of(records)) == ("GS203", "GS203")


def test_trouble_that_returns_at_once_is_the_same_trouble():
    lost = BAD._replace(loss_finite=False)
    records = renumbered([*[lost] * 12, *[GOOD] * 9, *[lost] * 12])
    assert codes(findings_of(records)) == ("GS203",)


def test_losses_under_which_steps_are_taken_are_never_hopeless():
    useless = GOOD._replace(loss_finite=False)
    (finding,) = findings_of(renumbered([*[GOOD] * 20, *[useless] * 200]))
    assert (finding.code, finding.step, finding.hopeless) == ("GS203", 28, False)


def test_skips_among_losses_under_which_steps_are_taken_are_not_added_up():
    useless = GOOD._replace(loss_finite=False)
    lost = BAD._replace(loss_finite=False)
    records = renumbered([*[GOOD] * 20, *([lost] * 7 + [useless]) * 9])
    assert [f.hopeless for f in findings_of(records)] == [False]


def test_losses_under_which_steps_are_taken_no_more_become_hopeless():
    useless = GOOD._replace(loss_finite=False)
    lost = BAD._replace(loss_finite=False)
    records = renumbered([*[GOOD] * 20, *[useless] * 9, *[lost] * 8])
    said = [(f.step, f.hopeless, f.evidence["times"]) for f in findings_of(records)]
    assert said == [(28, False, 1), (37, True, 1)]


def test_losses_that_are_said_to_be_of_no_use_are_not_said_to_be_over():
    useless = GOOD._replace(loss_finite=False)
    records = renumbered([*[GOOD] * 20, *[useless] * 9, *[GOOD] * 20])
    assert [f.step for f in findings_of(records)] == [28]


def test_losses_of_no_use_are_told_at_the_1st_2nd_and_4th_time():
    useless = GOOD._replace(loss_finite=False)
    records = renumbered([*[GOOD] * 12, *[useless] * 8] * 5)
    assert [f.evidence["times"] for f in findings_of(records)] == [1, 2, 4]


def test_a_run_was_well_when_ten_steps_in_a_row_were_finite():
    judge = Judge()
    records = [*[BAD] * 5, *[GOOD] * 9, BAD, *[GOOD] * 12, *[BAD] * 3]
    findings_of(renumbered(records[:15]), judge)
    assert judge.healthy_at == 0
    findings_of(renumbered(records)[15:], judge)
    assert judge.healthy_at == 27


def test_poisoned_batches_are_told_at_the_1st_2nd_4th_and_8th_time():
    lost = BAD._replace(loss_finite=False)
    records = renumbered([*[GOOD] * 20, *([lost] + [GOOD] * 20) * 15])
    assert [f.step for f in findings_of(records)] == [22, 43, 85, 169]


def test_a_run_that_ends_with_a_loss_that_is_not_finite_says_so():
    lost = BAD._replace(loss_finite=False)
    judge = Judge()
    for record in renumbered([*[GOOD] * 20, *[lost] * 3]):
        assert judge.see(record).findings == ()
    (finding,) = judge.end()
    assert (finding.code, finding.step, finding.since) == ("GS203", 23, 21)
    assert not finding.hopeless
    assert judge.end() == (finding,)


def test_a_run_that_ends_in_trouble_is_not_told_twice():
    lost = BAD._replace(loss_finite=False)
    assert codes(findings_of(renumbered([lost] * 11))) == ("GS203",)


def test_a_scale_that_fell_for_a_loss_is_no_falling_scale():
    losses = [*[2.0] * 1000, *[math.nan] * 6, *[2.0] * 500]
    records = dynamic([17.0] * len(losses), losses=losses)
    assert codes(findings_of(records)) == ("GS203",)


def test_steps_without_gradients_do_not_break_a_row():
    lost = BAD._replace(loss_finite=False)
    idle = GOOD._replace(read=False, applied=False)
    (finding,) = findings_of(renumbered([*[GOOD] * 20, *[lost, idle] * 10]))
    assert (finding.code, finding.step) == ("GS203", 35)


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


def test_a_collapse_prints_what_where_since_cost_advice_and_the_command():
    (finding,) = findings_of(falling(8, nan=True), Judge(tensors=211), ("a.weight",))
    assert finding.text() == (
        "GS208 step 59: gradients are NaN at any scale: S 2^16 -> 2^8, 9 of 9 steps "
        "skipped\n"
        "  where  a.weight\n"
        "  since  step 51\n"
        "  seen   NaN gradients; the loss was finite; 9 steps in a row; S fell by "
        "8 bits from 2^16 to 2^8; 1 of 211 tensors not finite, first a.weight\n"
        "  cost   no step was applied; 9 batches lost\n"
        "  try 1  The problem is local, 1 of 211 tensors, first a.weight: run its "
        "module in float32 (PyTorch: torch.autocast(device, enabled=False); JAX: "
        "Precision(..., keep=...)).\n"
        "  try 2  NaN gradients of a finite loss come from an undefined derivative: a "
        "root, a norm or a power at 0, 0/0, a mask of infinity. Keep the argument away "
        "from 0 before the operation, not after it.\n"
        "  more   gradscale explain GS208"
    )


def test_a_scale_of_0_or_infinity_is_judged_without_complaint():
    judge = Judge()
    for scale in (0.0, math.inf, math.nan, 5e-324):
        record = StepRecord(step=1, scale=scale, applied=False, finite=False)
        assert judge.see(record).verdict is Verdict.OVERFLOW


def test_healthy_noise_of_a_recorded_run_is_no_finding():
    records = dynamic(healthy("vit", seed=7, steps=5000), init=24)
    assert codes(findings_of(records)) == ("GS001",)
