"""What float16 makes of a histogram, against rounding each number."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradscale.core.exponent_histogram import (
    Histogram,
    fate,
    histogram_of,
    largest_scale,
    pooled,
    shift_between,
)
from gradscale.errors import ConfigError
from gradscale.runfile.rows import BINS, LOWEST_EXPONENT, TensorSample
from tests.core.exponents import half, histogram, octaves

NUMBERS = st.floats(-(2.0**16), 2.0**16, width=32, exclude_min=True, exclude_max=True)
SHIFTS = st.integers(-30, 30)


def rounded_as_told(number):
    """Return whether the exponent alone tells what float16 makes of a number."""
    return abs(number) != 2.0**-25 and not 65520.0 <= abs(number) < 65536.0


@given(numbers=st.lists(NUMBERS, max_size=60), shift=SHIFTS)
def test_every_element_fares_as_rounding_to_float16_says(numbers, shift):
    # Beyond the bins nothing is told; a test of its own is below.
    numbers = [x for x in numbers if x == 0.0 or abs(x) >= 2.0**-43]
    moved = [x * 2.0**shift for x in numbers]
    assume(all(map(rounded_as_told, moved)))
    seen = fate(histogram(numbers), shift)
    halves = [(x, abs(half(x))) for x in moved]
    assert seen.zeros == sum(x == 0.0 for x, _ in halves)
    assert seen.flushed == sum(x != 0.0 and y == 0.0 for x, y in halves)
    assert seen.degraded == sum(
        0.0 < y < 2.0**-14 for x, y in halves if abs(x) < 2e-5
    ) + (sum(2e-5 <= abs(x) < 2.0**-14 for x, _ in halves))
    assert seen.overflowed == sum(y == math.inf for _, y in halves)
    assert sum(seen[1:]) == len(numbers)


@given(numbers=st.lists(NUMBERS, min_size=1, max_size=60))
def test_raising_the_scale_loses_no_more_and_lowering_overflows_no_more(numbers):
    seen = histogram(numbers)
    fates = [fate(seen, shift) for shift in range(-70, 70)]
    lost = [each.lost for each in fates]
    overflow = [each.overflowed for each in fates]
    assert lost == sorted(lost, reverse=True)
    assert overflow == sorted(overflow)


def test_the_borders_of_float16_are_those_of_its_exponents():
    every = octaves(dict.fromkeys(range(-43, 16), 1))
    seen = fate(every)
    assert (seen.flushed, seen.degraded, seen.normal, seen.overflowed) == (
        18,
        11,
        30,
        0,
    )


@pytest.mark.parametrize("shift", [-20, 0, 20, 60])
def test_what_lies_outside_of_the_bins_counts_as_lost_or_as_too_large(shift):
    seen = fate(octaves({}, deep=3, above=5), shift)
    assert (seen.flushed, seen.overflowed) == (3, 5)


def test_what_is_not_finite_stays_apart():
    seen = fate(octaves({0: 6}, zeros=10, nonfinite=4))
    assert (seen.nonfinite, seen.lost, seen.overflowed) == (4, 0, 0)


def test_shares_of_nothing_are_zero():
    seen = fate(octaves({}))
    assert (seen.lost, seen.coarse) == (0, 0)


def test_subnormals_are_coarse():
    assert fate(octaves({-15: 1, -14: 3})).coarse == 0.25


def test_a_sample_of_a_run_file_has_the_same_fate():
    sample = TensorSample(17, 2, 3, (0, 3, *[0] * 37, 4), below=5, above=2, nonfinite=1)
    seen = histogram_of(sample, 8.0)
    assert seen.total == sample.total
    assert (seen.scale, seen.lowest, len(seen.bins)) == (8.0, LOWEST_EXPONENT, BINS)
    told = fate(seen)
    assert (told.flushed, told.degraded, told.normal, told.overflowed) == (5, 3, 4, 2)


def test_the_whole_is_the_sum_of_its_parts():
    whole = pooled(
        [
            octaves({-43: 1, 3: 2}, zeros=1, deep=2),
            octaves({-43: 4, 15: 9}, zeros=6, deep=7, above=3, nonfinite=4),
        ]
    )
    parts = octaves({-43: 5, 3: 2, 15: 9}, zeros=7, deep=9, above=3, nonfinite=4)
    assert whole == parts


@pytest.mark.parametrize(
    "histograms",
    [[], [octaves({}), octaves({}, scale=2.0)], [octaves({}), histogram([], bins=3)]],
)
def test_histograms_that_do_not_match_are_not_added_up(histograms):
    with pytest.raises(ConfigError, match=f"{len(histograms)} histograms.*one step"):
        pooled(histograms)


@pytest.mark.parametrize(("low", "high"), [(1.0, 3.0), (1000.0, 1024.0)])
def test_scales_that_are_no_power_of_two_apart_are_refused(low, high):
    with pytest.raises(ConfigError, match="no power of two apart"):
        shift_between(low, high)


@given(numbers=st.lists(NUMBERS, min_size=1, max_size=60))
def test_the_largest_scale_is_the_last_at_which_no_bin_overflows(numbers):
    seen = histogram([x for x in numbers if abs(x) >= 2.0**-43], scale=8.0)
    assume(seen.nonzero)
    shift = shift_between(8.0, largest_scale(seen))
    assert fate(seen, shift).overflowed == 0
    assert fate(seen, shift + 1).overflowed > 0


@given(peak=st.floats(2.0**-40, 2.0**15, width=32))
def test_with_a_peak_the_largest_scale_is_exact(peak):
    scale = largest_scale(histogram([peak], scale=8.0), peak)
    assert half(peak * scale / 8.0) < math.inf
    assert half(peak * scale / 4.0) == math.inf


@pytest.mark.parametrize(("peak", "scale"), [(65519.0, 8.0), (65520.0, 4.0)])
def test_half_a_step_above_the_largest_float16_is_too_large(peak, scale):
    assert largest_scale(histogram([peak], scale=8.0), peak) == scale


def test_a_peak_tells_a_largest_scale_beyond_the_bins():
    assert largest_scale(octaves({}, above=1), peak=2.0**17) == 0.25


@pytest.mark.parametrize(
    "seen",
    [
        octaves({}),
        octaves({0: 1}, nonfinite=1),
        octaves({0: 1}, above=1),
        octaves({}, deep=1),
    ],
    ids=["empty", "not finite", "above", "deep"],
)
def test_a_largest_scale_that_is_not_known_is_none(seen):
    assert largest_scale(seen) is None


def test_a_histogram_counts_by_exponent():
    seen = Histogram(1.0, 1, 2, -2, (3, 4, 5), 6, 7)
    assert (seen.total, seen.nonzero) == (28, 20)
    assert (seen.between(-9, 0), seen.between(-1, 9), seen.between(-9, -3)) == (7, 9, 0)
