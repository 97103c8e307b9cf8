"""Zeros that backward has flushed, estimated from two scales."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.core.flushed import Flushed, closest_pair, estimate_flushed
from gradscale.errors import ConfigError
from tests.core.exponents import half, histogram, octaves


def gradients(rng, count, draw, true_zeros):
    """Return exact gradients, some of them truly 0."""
    return [0.0 if rng.random() < true_zeros else draw(rng) for _ in range(count)]


def flat(rng):
    return rng.gauss(0.0, 2.0**-22)


def wide(rng):
    """Spread over octaves, more than float16 holds at any scale."""
    return rng.choice((-1.0, 1.0)) * 2.0 ** rng.gauss(-22.0, 4.0)


def in_float16(exact, scale):
    """Return the histogram of what a backward pass in float16 leaves, and its loss."""
    left = [half(x * scale) for x in exact]
    flushed = sum(x != 0.0 and y == 0.0 for x, y in zip(exact, left, strict=True))
    return histogram(left, scale, lowest=-24, bins=40), flushed / len(exact)


@pytest.mark.parametrize("octaves_apart", [1, 4])
@pytest.mark.parametrize("true_zeros", [0.0, 0.25])
def test_flushed_zeros_are_told_from_true_ones(octaves_apart, true_zeros):
    rng = random.Random(7)
    exact = gradients(rng, 60_000, flat, true_zeros)
    low, lost_low = in_float16(exact, 1.0)
    high, lost_high = in_float16(exact, 2.0**octaves_apart)
    told = estimate_flushed(low, high)
    # Four deviations of 60,000 draws, twice over for the power.
    assert told.at_low == pytest.approx(lost_low, abs=0.01)
    assert told.at_high == pytest.approx(lost_high, abs=0.01)
    assert told.true_zeros == pytest.approx(true_zeros, abs=0.01)
    assert told.reliable


@pytest.mark.parametrize("octaves_apart", [1, 4])
@pytest.mark.parametrize("true_zeros", [0.0, 0.25])
def test_gradients_of_many_octaves_lie_between_the_two_figures(
    octaves_apart, true_zeros
):
    rng = random.Random(7)
    exact = gradients(rng, 60_000, wide, true_zeros)
    low, lost_low = in_float16(exact, 1.0)
    high, lost_high = in_float16(exact, 2.0**octaves_apart)
    told = estimate_flushed(low, high)
    assert told.at_least == pytest.approx(lost_low - lost_high)
    assert told.at_least <= lost_low <= told.at_low + 1e-9
    assert told.reliable


def test_for_flat_densities_the_estimate_is_close():
    rng = random.Random(3)
    exact = gradients(rng, 60_000, flat, 0.1)
    low, lost_low = in_float16(exact, 1.0)
    high, lost_high = in_float16(exact, 2.0)
    told = estimate_flushed(low, high)
    assert lost_low > 0.08
    assert told.at_low == pytest.approx(lost_low, abs=0.01)
    assert told.at_high == pytest.approx(lost_high, abs=0.01)


def test_two_batches_of_one_distribution_do():
    rng = random.Random(5)
    low, lost = in_float16(gradients(rng, 60_000, flat, 0.1), 1.0)
    high, _ = in_float16(gradients(rng, 90_000, flat, 0.1), 4.0)
    told = estimate_flushed(low, high)
    assert told.at_low == pytest.approx(lost, abs=0.01)
    assert told.reliable


@pytest.mark.parametrize("changed", [1 / 16, 16])
def test_gradients_that_have_changed_in_between_are_not_trusted(changed):
    rng = random.Random(5)
    exact = gradients(rng, 20_000, flat, 0.0)
    low, _ = in_float16(exact, 1.0)
    high, _ = in_float16([changed * x for x in exact], 2.0)
    told = estimate_flushed(low, high)
    assert told.drift > 0.4
    assert not told.reliable


def test_it_says_that_samples_differ():
    low = octaves({-24: 300, 0: 700}, zeros=200)
    high = octaves({-23: 300, 5: 700}, 2.0, zeros=80)
    told = estimate_flushed(low, high)
    assert told.told
    assert told.drift > 0.5
    assert str(told) == (
        "the samples at S = 2^0 and 2^1 differ by too much to tell flushed zeros from "
        "true ones"
    )


def test_it_calls_its_figures_estimates():
    rng = random.Random(3)
    exact = gradients(rng, 60_000, flat, 0.1)
    said = str(estimate_flushed(in_float16(exact, 1.0)[0], in_float16(exact, 2.0)[0]))
    assert re.fullmatch(
        r"by an estimate from S = 2\^0 and 2\^1, backward flushed about \S+ % of the "
        r"elements at 2\^0, \S+ % at least, and \S+ % at 2\^1; about \S+ % are true "
        r"zeros",
        said,
    )


def test_the_same_gradients_do_not_drift():
    rng = random.Random(5)
    exact = gradients(rng, 60_000, wide, 0.2)
    low, _ = in_float16(exact, 1.0)
    high, _ = in_float16(exact, 8.0)
    assert estimate_flushed(low, high).drift < 0.01


def test_a_histogram_that_does_not_fall_off_bounds_the_estimate_by_all_zeros():
    low = octaves({-24: 500, 0: 600}, zeros=900)
    high = octaves({-24: 500, 0: 1100}, 2.0, zeros=400)
    told = estimate_flushed(low, high)
    assert told.at_high == 400 / 2000
    assert told.true_zeros == 0.0
    assert not told.reliable


def test_a_range_is_all_that_a_histogram_tells_that_does_not_fall_off():
    told = Flushed(1.0, 2.0, 0.25, 0.45, 0.2, 0.0, drift=0.0, told=False)
    assert str(told) == (
        "by the samples at S = 2^0 and 2^1, backward flushed 25 % to 45 % of the "
        "elements at 2^0; which zeros are true ones cannot be told"
    )


def test_few_elements_are_carried_on_as_if_flat():
    low = octaves({-24: 99, -21: 901}, zeros=300)
    high = octaves({-24: 99, -21: 1101}, 4.0, zeros=120)
    told = estimate_flushed(low, high)
    assert told.at_high == pytest.approx((180 / 1300 - 20 / (3 * 1320)) / 3, abs=0.005)
    assert told.told


def test_fewer_zeros_at_the_lower_scale_are_chance_and_nothing_is_flushed():
    low, high = octaves({0: 100}, zeros=10), octaves({1: 100}, 2.0, zeros=12)
    told = estimate_flushed(low, high)
    assert (told.at_least, told.at_low, told.at_high) == (0.0, 0.0, 0.0)
    assert told.true_zeros == 12 / 112


@settings(max_examples=50)
@given(
    zeros=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    counts=st.lists(st.integers(0, 1000), min_size=10, max_size=10),
    apart=st.integers(1, 20),
)
def test_no_estimate_exceeds_the_zeros_there_are(zeros, counts, apart):
    bins = {-24 + i: count for i, count in enumerate(counts)} | {0: 1}
    low = octaves(bins, zeros=zeros[0])
    high = octaves(bins, 2.0**apart, zeros=zeros[1])
    told = estimate_flushed(low, high)
    most = max(low.zeros / low.total, high.zeros / high.total)
    assert 0.0 <= told.at_high <= high.zeros / high.total
    assert told.at_high <= told.at_low <= most + told.at_high
    assert told.true_zeros >= 0.0
    assert 0.0 <= told.drift <= 1.0


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_samples_in_the_wrong_order_are_refused(scale):
    with pytest.raises(ConfigError, match="lower scale first"):
        estimate_flushed(octaves({0: 1}), octaves({0: 1}, scale))


def test_an_empty_sample_is_refused():
    with pytest.raises(ConfigError, match="tells nothing"):
        estimate_flushed(octaves({}), octaves({0: 1}, 2.0))


def test_the_latest_move_of_the_scale_gives_the_pair():
    samples = [octaves({0: i}, scale) for i, scale in enumerate((8, 4, 4, 2, 2))]
    assert closest_pair(samples) == (samples[3], samples[2])


def test_samples_that_overflowed_are_passed_over():
    first, last = octaves({0: 1}, 8.0), octaves({0: 1}, 2.0)
    burst = octaves({0: 1}, 4.0, nonfinite=1)
    assert closest_pair([first, burst, last]) == (last, first)


@pytest.mark.parametrize("scales", [(), (4.0,), (4.0, 4.0), (4.0, 3.0)])
def test_a_scale_that_has_not_moved_by_octaves_gives_no_pair(scales):
    assert closest_pair([octaves({0: 1}, scale) for scale in scales]) is None
