"""The early warning: before the collapse in lost runs, never in healthy ones."""

import math
from itertools import pairwise

import pytest

from gradscale import DynamicScale, Observed, StepRecord
from gradscale.core.state import PYTHON
from gradscale.judge.judge import Judge
from gradscale.judge.trend import Trend, exponent
from tests.judge import histories
from tests.judge.histories import NOISE, dynamic, healthy

CALM = StepRecord(step=1, scale=2.0**16, applied=True, finite=True, amax=100.0)


def alarms_of(records, trend=None):
    trend = trend or Trend()
    seen = (trend.add(record) for record in records)
    return [alarm for alarm in seen if alarm is not None]


def steady(scales, **fields):
    return [
        CALM._replace(step=step, scale=2.0**log, **fields)
        for step, log in enumerate(scales, start=1)
    ]


@pytest.mark.parametrize("interval", [5, 100])
@pytest.mark.parametrize("init", [14, 24])
def test_the_histories_follow_the_rule_of_the_policy(interval, init):
    policy = DynamicScale(init_scale=2.0**init, growth_interval=interval)
    state = policy.init_state()
    for record in dynamic(healthy("vit", 1, 2000), init=init, interval=interval):
        assert record.scale == state.scale
        seen = Observed(record.finite, 1.0, True)
        state = policy.next_state(state, seen, PYTHON.where)


# Kinds, growth intervals and first scales: every kind with a short and a long interval.
HEALTHY = [
    (kind, interval, init)
    for index, kind in enumerate(NOISE)
    for interval, init in (((100, 16), (2000, 32)), ((400, 32), (1000, 24)))[index % 2]
]


# From step 10,000 to 30,000 the safe scale falls, by 4 bits.
@pytest.mark.parametrize(("kind", "interval", "init"), HEALTHY)
def test_a_healthy_run_of_30000_steps_gives_no_alarm(kind, interval, init):
    judge = Judge()
    safe = healthy(kind, seed=interval + init, steps=30_000)
    said = [
        finding.code
        for record in dynamic(safe, init=init, interval=interval)
        for finding in judge.see(record).findings
    ]
    assert [code for code in said if code != "GS001"] == []


def test_a_fixed_scale_gives_no_alarm():
    noise = healthy("policy_gradient", seed=3, steps=20_000, drift=1.0)
    records = (
        CALM._replace(step=step, amax=2.0 ** (16.0 - bits))
        for step, bits in enumerate(noise, start=1)
    )
    assert alarms_of(records) == []


def test_a_scale_that_grows_from_a_low_start_gives_no_alarm():
    safe = healthy("gpt", seed=5, steps=5_000)
    assert alarms_of(dynamic(safe, init=4, interval=100)) == []


# When the run was lost, and the first alarm.
@pytest.mark.parametrize(
    ("history", "lost", "alarmed"),
    [
        ("glm_130b", 33_740, 33_725),
        ("bigscience_104b", 7_000, 6_083),
        ("opt_175b", 3_908, 3_096),
    ],
)
def test_a_lost_run_is_announced_before_it_is_lost(history, lost, alarmed):
    first = alarms_of(getattr(histories, history)())[0]
    assert (first.signal, first.step) == ("scale", alarmed)
    assert first.step < lost


def test_a_spike_is_announced_when_its_fourth_overflow_is_over():
    (alarm,) = alarms_of(histories.bigscience_13b())
    assert (alarm.signal, alarm.since, alarm.step) == ("scale", 29_001, 29_011)


def test_a_fall_is_announced_again_at_twice_the_depth_only():
    falls = [alarm.bits for alarm in alarms_of(histories.opt_175b())]
    assert len(falls) == 3
    assert all(later >= 1.9 * before for before, later in pairwise(falls))


def test_an_alarm_says_since_when_by_how_much_and_from_where():
    (alarm,) = alarms_of(steady([16] * 1000 + [15, 14, 13, 12]))
    assert (alarm.signal, alarm.since, alarm.step, alarm.now) == (
        *("scale", 1001, 1004, 12.0),
    )
    assert alarm.usual == pytest.approx(16.0, abs=0.01)
    assert alarm.bits == pytest.approx(4.0, abs=0.01)


def test_three_backoffs_are_no_alarm():
    assert alarms_of(steady([16] * 1000 + [15, 14, 13] + [13] * 300)) == []


def test_a_policy_that_backs_off_by_more_is_measured_by_its_own_moves():
    assert alarms_of(steady([16] * 1000 + [12, 8, 4])) == []
    assert len(alarms_of(steady([16] * 1000 + [12, 8, 4, 0]))) == 1


def test_there_is_no_alarm_before_there_is_a_usual_scale():
    assert alarms_of(steady([16] * 150 + list(range(15, 0, -1)))) == []


def test_an_alarm_waits_for_a_finite_step():
    fall = steady([16] * 1000 + [15, 14, 13, 12, 11])
    bad = [record._replace(finite=record.step <= 1000) for record in fall]
    assert alarms_of(bad) == []
    bad[-1] = bad[-1]._replace(finite=True)
    assert [alarm.step for alarm in alarms_of(bad)] == [1005]


def test_backoffs_for_a_known_cause_are_no_fall():
    trend = Trend()
    for record in steady([16] * 1000 + [15, 14, 13, 12, 11]):
        assert trend.add(record, blamed=record.step >= 1000) is None


def test_a_run_that_came_back_may_fall_again():
    fall = [15, 14, 13, 12]
    seen = alarms_of(steady([16] * 1000 + fall + [16] * 1000 + fall))
    assert [alarm.step for alarm in seen] == [1004, 2008]


# Ten times in 5000 steps the scale goes down by three and comes back.
SWINGING = ([16] * 490 + [15, 14, 13, 13, 13, 13, 14, 15, 16, 16]) * 10


def test_a_run_that_swings_by_three_backoffs_may_swing_by_four():
    assert alarms_of(steady(SWINGING + [16] * 490 + [15, 14, 13, 12])) == []


def test_a_run_that_swings_is_announced_when_it_falls_twice_as_deep():
    fall = [16] * 490 + list(range(15, 8, -1))
    (alarm,) = alarms_of(steady(SWINGING + fall))
    assert alarm.bits == pytest.approx(7.0, abs=0.1)


def test_swings_are_remembered_over_a_calm_stretch():
    assert alarms_of(steady(SWINGING + [16] * 5000 + [15, 14, 13, 12])) == []


def test_swings_of_long_ago_are_forgotten():
    calm = [16] * 60_000
    assert len(alarms_of(steady(SWINGING + calm + [15, 14, 13, 12]))) == 1


def growing(bits, amax=5.0):
    """Return 300 calm steps, then gradients that double every ten steps."""
    sizes = [amax] * 300 + [amax + step / 10.0 for step in range(10 * bits)]
    sizes += [amax + bits] * 100
    return [
        CALM._replace(step=step, amax=2.0**size) for step, size in enumerate(sizes, 1)
    ]


def test_gradients_that_grow_towards_65504_give_an_alarm():
    (alarm,) = alarms_of(growing(9))
    assert (alarm.signal, alarm.since) == ("headroom", 340)
    assert alarm.step < 410
    assert alarm.bits >= 4.0


def test_gradients_that_grow_far_from_65504_give_none():
    assert alarms_of(growing(9, amax=-4.0)) == []


def test_large_gradients_that_stay_as_they_are_give_none():
    assert alarms_of(growing(0, amax=15.0)) == []


def test_growth_is_measured_without_the_scale():
    trend = Trend()
    alarms_of(growing(9), trend)
    doubled = [r._replace(scale=2.0**20, amax=r.amax * 16.0) for r in growing(9)]
    other = Trend()
    alarms_of(doubled, other)
    assert other.growth() == trend.growth()


@pytest.mark.parametrize(
    ("scale", "log"),
    [(1024.0, 10.0), (0.0, -150.0), (5e-324, -150.0), (math.inf, 128.0)],
)
def test_any_scale_has_an_exponent(scale, log):
    assert exponent(scale) == log


def test_a_scale_that_is_nan_counts_as_0():
    assert exponent(math.nan) == -150.0
