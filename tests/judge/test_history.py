"""The history of a run in a fixed number of scalars."""

import math

import pytest

from gradscale.judge.history import Episode, History, Scattered, Streak
from gradscale.judge.trend import TOP
from tests.judge.judged import is_lost
from tests.judge.sick_runs import BAD, GOOD


def history_of(records):
    history = History()
    for step, record in enumerate(records, start=1):
        if record.read:
            history.add(record._replace(step=step), lost=is_lost(record))
        else:
            history.add_idle(step)
    return history


def with_losses(*losses):
    return history_of(GOOD._replace(loss=loss) for loss in losses)


def test_a_streak_counts_from_its_first_step_and_begins_anew():
    streak = Streak()
    for step, holds in ((7, True), (8, True), (9, False)):
        streak.add(step, holds)
    assert streak.length == 0
    streak.add(20, True)
    assert streak == Streak(length=1, since=20)


@pytest.mark.parametrize(
    ("gaps", "every"),
    [((8, 8), 8), ((8,), 0), ((8, 9), 0), ((9, 8, 8), 8), ((4, 4), 0)],
    ids=["twice", "once", "unequal", "the last ones", "too close"],
)
def test_episodes_recur_if_their_last_distances_are_equal(gaps, every):
    scattered, since = Scattered(), 100
    scattered.add(Episode(since, 8.0, None, False, False))
    for gap in gaps:
        since += gap
        scattered.add(Episode(since, 8.0, None, False, False))
    assert scattered.every == every


def test_scattered_episodes_know_their_scales_losses_and_least_headroom():
    scattered = Scattered()
    for since, headroom, scale in ((10, None, 8.0), (30, 12.0, 4.0), (60, 14.0, 16.0)):
        episode = Episode(since, scale, headroom, False, False)
        bad = BAD._replace(step=since, scale=scale, nan=since == 30)
        episode.add_lost(bad, (), None)
        scattered.add(episode)
    assert (scattered.times, scattered.lost, scattered.nan) == (3, 3, 1)
    assert (scattered.since, scattered.last, scattered.headroom) == (10, 60, 12.0)
    assert (scattered.highest, scattered.lowest) == (16.0, 4.0)


def test_the_headroom_is_that_of_the_largest_recent_gradient():
    sizes = [2.0**8, 2.0**12, 2.0**4]
    history = history_of(GOOD._replace(amax=size) for size in sizes)
    assert history.headroom(2.0**16) == TOP - 12.0
    assert history.headroom(2.0**12) == TOP - 8.0


def test_a_large_gradient_of_two_hundred_steps_ago_is_forgotten():
    sizes = [2.0**14, *[2.0**4] * 200]
    history = history_of(GOOD._replace(amax=size) for size in sizes)
    assert history.headroom(2.0**16) == TOP - 4.0


def test_without_a_finite_gradient_no_headroom_is_known():
    assert history_of([BAD]).headroom(8.0) is None
    assert history_of([GOOD._replace(amax=0.0)]).headroom(8.0) is None


def test_the_sizes_of_first_and_last_gradients_are_those_without_the_scale():
    first = [GOOD._replace(scale=2.0**16, amax=2.0**10)] * 20
    last = [GOOD._replace(scale=2.0**8, amax=2.0**10)] * 200
    history = history_of([*first, *last])
    assert history.size_start == -6.0
    assert history.size == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(
    ("amax", "samples"), [(2.0**7, 3), (2.0**9, 0)], ids=["9 bits", "7 bits"]
)
def test_samples_of_a_lost_layer_count_by_whether_eight_bits_are_unused(amax, samples):
    lost = GOOD._replace(amax=amax, lost=0.1, lost_layer="head")
    first = GOOD._replace(amax=amax)
    history = history_of([first, *[lost] * 3])
    assert (history.layer_samples, history.layer_sinking) == (3, samples)


def test_a_layer_of_another_name_begins_its_own_count():
    lost = [GOOD._replace(amax=1.0, lost=0.0, lost_layer=name) for name in "aab"]
    history = history_of([GOOD._replace(amax=1.0), *lost])
    assert (history.layer, history.layer_samples, history.layer_since) == ("b", 1, 4)


def test_the_scale_that_fits_is_the_highest_of_ten_finite_steps_in_a_row():
    high = [GOOD._replace(scale=2.0**20)] * 9
    history = history_of([*high, BAD, *[GOOD] * 10, *[GOOD._replace(scale=8.0)] * 20])
    assert (history.fitting_scale, history.healthy_at) == (2.0**16, 40)


def test_a_loss_that_rose_by_half_for_good_is_rising():
    assert with_losses(*[2.0] * 40, *[4.0] * 40).rising()


def test_a_loss_that_falls_is_not_rising():
    assert not with_losses(*[4.0] * 40, *[2.0] * 40).rising()


def test_one_large_loss_is_no_rise():
    assert not with_losses(*[2.0] * 40, 10.0).rising()


def test_forty_losses_are_read_before_a_rise_is_claimed():
    early = [2.0] * 20 + [40.0] * 19
    assert not with_losses(*early).rising()
    assert with_losses(*early, 40.0).rising()


def test_two_losses_far_above_the_first_are_a_rise_of_a_young_run():
    assert with_losses(8.0, 6.0, 128.0, 200.0).soared()
    assert not with_losses(8.0, 6.0, 127.0, 200.0).soared()
    assert not with_losses(8.0, 6.0, 200.0, 127.0).soared()


def test_one_loss_far_above_the_first_is_no_rise():
    assert not with_losses(8.0, 500.0).soared()
    assert not with_losses(8.0).soared()


def test_from_forty_losses_on_their_mean_tells_of_a_rise():
    losses = [2.0] * 37 + [64.0] * 2
    assert with_losses(*losses).soared()
    assert not with_losses(*losses, 64.0).soared()
    assert with_losses(*losses, 64.0).rising()


def test_a_first_loss_of_0_or_below_is_never_risen_from():
    assert not with_losses(0.0, 5.0, 5.0).soared()
    assert not with_losses(-1.0, 5.0, 5.0).soared()


def test_gradients_are_compared_with_the_loss():
    huge = GOOD._replace(scale=2.0**-8, amax=2.0**14, loss=0.25)
    assert history_of([huge] * 3).amplification() == 24.0
    assert history_of([huge._replace(loss=None)]).amplification() == 0.0


def test_a_loss_that_is_negative_is_never_called_rising():
    assert not with_losses(*[-4.0] * 40, *[-1.0] * 40).rising()


def test_a_loss_that_is_not_finite_is_not_averaged():
    history = with_losses(2.0, math.nan, math.inf, 4.0)
    assert (history.losses, history.loss_mean) == (2, 3.0)


def test_only_neighbouring_samples_that_lost_too_much_are_a_row():
    samples = [GOOD._replace(lost=0.5), GOOD, GOOD._replace(lost=0.5)]
    assert history_of(samples).lost.length == 2
    assert history_of([*samples, GOOD._replace(lost=0.0)]).lost.length == 0
