"""An episode: one stretch of lost steps, whatever their reasons."""

import math

import pytest

from gradscale.judge.history import Episode
from tests.judge.judged import is_lost
from tests.judge.sick_runs import BAD, GOOD

LOST = BAD._replace(loss_finite=False, loss=math.nan)
USELESS = GOOD._replace(loss_finite=False, loss=math.inf)


def episode_of(*records, **fields):
    """Return an episode of these steps, from step 1 on at 2^16."""
    given = {"headroom": None, "raised": False, "new_scale": False, **fields}
    episode = Episode(since=1, scale_from=2.0**16, **given)
    for step, record in enumerate(records, start=1):
        if is_lost(record):
            episode.add_lost(record._replace(step=step), (), None)
        else:
            episode.add_finite()
    return episode


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({}, False),
        ({"lost": 0.9}, False),
        ({"finite": False}, True),
        ({"loss_finite": False}, True),
        ({"norm_finite": False}, True),
        ({"weights_finite": False}, True),
        ({"applied": False}, False),
    ],
)
def test_a_step_is_lost_if_anything_in_it_was_not_finite(change, lost):
    assert is_lost(GOOD._replace(**change)) is lost


def test_five_finite_steps_in_a_row_end_an_episode():
    episode = episode_of(BAD, GOOD, GOOD, GOOD, GOOD, BAD)
    assert [episode.add_finite() for _ in range(5)] == [*[False] * 4, True]


def test_finite_steps_between_lost_ones_belong_to_it_and_those_after_do_not():
    episode = episode_of(BAD, GOOD, GOOD, BAD, BAD, GOOD)
    assert (episode.lost, episode.taken, episode.steps) == (3, 2, 5)
    assert (episode.last, episode.finite, episode.lost_in_row) == (5, 1, 0)


def test_losses_and_gradients_are_counted_apart():
    episode = episode_of(BAD, LOST, BAD, LOST, LOST)
    assert (episode.lost, episode.lost_in_row) == (5, 5)
    assert (episode.losses, episode.loss_row) == (3, 2)
    assert (episode.gradients, episode.gradient_row) == (2, 0)


def test_a_loss_under_which_the_step_is_applied_breaks_the_row_of_losses():
    episode = episode_of(LOST, LOST, USELESS, LOST)
    assert (episode.losses, episode.loss_row, episode.applied) == (4, 1, 1)


@pytest.mark.parametrize(
    ("loss", "kind"), [(math.nan, "nan"), (-math.inf, "inf"), (None, ""), (2.0, "")]
)
def test_the_kind_of_a_loss_is_that_of_the_last_one(loss, kind):
    assert episode_of(LOST, LOST._replace(loss=loss)).loss_kind == kind


def test_a_scaled_loss_that_overflows_is_no_evidence_on_gradients():
    episode = episode_of(BAD, BAD, BAD._replace(scaled_loss_finite=False))
    assert (episode.scaled_losses, episode.gradient_row) == (1, 0)


def test_a_norm_that_overflows_is_counted_under_finite_gradients():
    beyond = GOOD._replace(applied=False, norm_finite=False)
    assert (episode_of(beyond).norms, episode_of(BAD).norms) == (1, 0)


def test_the_scale_falls_from_where_the_last_finite_step_was():
    scales = (2.0**17, 2.0**16, 2.0**15)
    episode = episode_of(*(BAD._replace(scale=scale) for scale in scales))
    assert (episode.bits, episode.row_bits) == (1.0, 1.0)
    assert (episode.scale, episode.lowest) == (2.0**15, 2.0**15)


def test_the_bits_of_a_row_begin_with_the_row():
    low = BAD._replace(scale=2.0**12)
    episode = episode_of(BAD, LOST._replace(scale=2.0**14), low)
    assert (episode.bits, episode.row_bits) == (4.0, 2.0)


def test_steps_at_the_scale_of_the_one_before_are_held():
    episode = episode_of(BAD, BAD, BAD, BAD._replace(scale=2.0**15))
    assert (episode.gradient_row, episode.same_scale) == (4, 2)


def test_a_row_knows_its_nans_and_the_steps_after_the_last():
    kinds = [BAD._replace(nan=nan) for nan in (False, True, True, False, False)]
    episode = episode_of(*kinds)
    assert (episode.nan, episode.after_nan) == (2, 2)
    again = episode_of(*kinds, LOST, BAD)
    assert (again.nan, again.after_nan) == (0, 1)


def test_steps_with_much_headroom_are_counted_with_their_fall():
    episode = episode_of(BAD)
    for bits, headroom in enumerate((11.9, 12.0, 20.0)):
        scale = 2.0 ** (16 - bits)
        episode.add_lost(BAD._replace(scale=scale), (), headroom)
    assert (episode.headroom_skips, episode.bits_lost_with_headroom) == (2, 1.0)
    episode.add_lost(BAD._replace(grown=True), (), 20.0)
    episode.add_lost(LOST, (), 20.0)
    assert episode.headroom_skips == 2


def test_the_culprits_are_those_of_the_last_step():
    episode = episode_of()
    episode.add_lost(BAD, ("a", "b"), None)
    assert (episode.culprit, episode.culprits) == ("a", 2)
    episode.add_lost(BAD, (), None)
    assert (episode.culprit, episode.culprits) == ("", 0)
