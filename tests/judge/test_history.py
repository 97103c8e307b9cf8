"""The history of a run in a fixed number of scalars."""

import math

from gradscale.judge.history import History, Streak
from tests.judge.sick_runs import BAD, GOOD


def history_of(records):
    history = History()
    for step, record in enumerate(records, start=1):
        history.add(record._replace(step=step), ())
    return history


def with_losses(*losses):
    return history_of(GOOD._replace(loss=loss) for loss in losses)


def test_a_streak_knows_its_length_its_beginning_and_its_scales():
    streak = Streak()
    for step, scale in ((7, 64.0), (8, 32.0), (9, 32.0)):
        streak.extend(BAD._replace(step=step, scale=scale, nan=step > 7))
    assert streak == Streak(
        length=3, since=7, origin=64.0, nan=2, held=1, last=32.0, skips=3
    )


def test_a_streak_knows_how_many_were_taken_and_how_many_not_since():
    streak = Streak()
    for applied in (False, True, True, False, False):
        streak.extend(BAD._replace(applied=applied))
    assert (streak.applied, streak.skips) == (2, 2)


def test_a_streak_knows_how_many_came_after_the_last_nan():
    streak = Streak()
    for nan in (False, True, True, False, False, False):
        streak.extend(BAD._replace(nan=nan))
    assert (streak.nan, streak.after_nan) == (2, 3)


def test_a_streak_that_ended_begins_anew():
    streak = Streak()
    streak.extend(BAD._replace(step=7, nan=True))
    streak.extend(BAD._replace(step=8, nan=True))
    streak.extend(GOOD._replace(step=9))
    streak.length = 0
    streak.extend(BAD._replace(step=20, scale=8.0))
    assert streak == Streak(
        length=1, since=20, origin=8.0, nan=0, held=0, last=8.0, skips=1, after_nan=1
    )


def test_bad_steps_fall_from_the_last_scale_that_fitted():
    grown = BAD._replace(scale=2.0**17, grown=True)
    assert history_of([GOOD, grown, BAD]).bad.origin == 2.0**16


def test_bad_steps_before_any_good_one_fall_from_the_first_scale():
    assert history_of([BAD._replace(scale=2.0**24), BAD]).bad.origin == 2.0**24


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


def test_a_loss_that_nobody_read_is_known_to_have_been_finite():
    lost = BAD._replace(loss_finite=False)
    assert history_of([BAD, lost]).loss_known
    assert not history_of([lost, lost]).loss_known


def test_a_loss_that_is_negative_is_never_called_rising():
    assert not with_losses(*[-4.0] * 40, *[-1.0] * 40).rising()


def test_a_loss_that_is_not_finite_is_not_averaged():
    history = with_losses(2.0, math.nan, math.inf, 4.0)
    assert (history.losses, history.loss_mean) == (2, 3.0)


def test_only_neighbouring_samples_that_lost_too_much_are_a_row():
    samples = [GOOD._replace(lost=0.5), GOOD, GOOD._replace(lost=0.5)]
    assert history_of(samples).lost.length == 2
    assert history_of([*samples, GOOD._replace(lost=0.0)]).lost.length == 0
