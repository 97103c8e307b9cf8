"""A run that went on is not called lost, and a step that was taken not skipped."""

import math

import pytest

from gradscale.diagnosis.following import Follower
from gradscale.judge.findings import Health
from gradscale.runfile import RunWriter, open_run
from tests.diagnosis import runs
from tests.diagnosis.runs import diagnosed, facts


def ruined_for_a_while(good, again=0):
    """Return a run that is lost from step 100 to 112, and so many good steps."""
    flags = [True] * 99 + [False] * 13 + [True] * good + [False] * again
    well = facts(finite=True, applied=True, loss=2.0)
    lost = facts(loss_finite=False, loss=math.nan, nan=True)
    return [
        (well if flag else lost)._replace(step=step, calibrated=step > 1)
        for step, flag in enumerate(flags, start=1)
    ]


@pytest.mark.parametrize(
    ("good", "health"), [(9, Health.COLLAPSE), (10, Health.FINDINGS)]
)
def test_ten_finite_steps_after_it_mend_what_was_hopeless(tmp_path, good, health):
    runs.write(tmp_path / "run.gs", ruined_for_a_while(good))
    assert diagnosed(tmp_path / "run.gs").health is health


@pytest.mark.parametrize(
    ("good", "health"), [(9, Health.COLLAPSE), (10, Health.FINDINGS)]
)
def test_a_run_that_is_followed_is_mended_in_the_same_way(tmp_path, good, health):
    runs.write(tmp_path / "run.gs", ruined_for_a_while(good))
    with open_run(tmp_path / "run.gs") as run:
        follower = Follower(run)
        follower.poll()
        assert follower.health is health


def test_a_run_that_is_lost_again_is_a_collapse_said_once(tmp_path):
    runs.write(tmp_path / "run.gs", ruined_for_a_while(20, again=10))
    diagnosis = diagnosed(tmp_path / "run.gs")
    [finding] = diagnosis.findings
    assert diagnosis.health is Health.COLLAPSE
    assert (finding.step, finding.since, finding.evidence["times"]) == (142, 100, 2)
    assert finding.what.endswith("; reported twice (steps 109 and 142)")


def test_a_message_that_was_hopeless_is_mended_as_well(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 31):
            writer.step(step, 1024.0, True, "GS000")
        writer.event("GS208", step=12, data={"what": "seen live"})
    assert diagnosed(tmp_path / "run.gs").health is Health.FINDINGS


def test_steps_that_were_taken_under_a_bad_loss_are_not_counted_as_skipped(tmp_path):
    well = facts(finite=True, applied=True, loss=2.0)
    records = [well] * 20 + [well._replace(loss_finite=False, loss=math.inf)] * 20
    numbered = [r._replace(step=n) for n, r in enumerate(records, start=1)]
    runs.write(tmp_path / "run.gs", numbered)
    diagnosis = diagnosed(tmp_path / "run.gs")
    assert (diagnosis.applied, diagnosis.skipped) == (40, 0)
    assert diagnosis.health is Health.FINDINGS
    with open_run(tmp_path / "run.gs") as run:
        follower = Follower(run)
        follower.poll()
    assert follower.skipped == 0
