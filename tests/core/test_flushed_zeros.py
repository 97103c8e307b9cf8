"""Zeros that backward has flushed, estimated from one sample."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale.core.exponent_histogram import histogram_of
from gradscale.core.flushed_zeros import Tally, hidden_zeros, lost_share, tally_of
from gradscale.runfile.rows import TensorSample
from tests.core.exponents import half, histogram, octaves

NOTHING = octaves({}, zeros=100)
HISTOGRAMS = st.builds(
    lambda counts, zeros, above: octaves(counts, zeros=zeros, above=above),
    st.dictionaries(st.integers(-30, 15), st.integers(0, 1000)),
    st.integers(0, 5000),
    st.integers(0, 10),
)
# No element that is smaller than float16 has, and none that is close to it.
WELL_WITHIN = st.builds(
    lambda counts, zeros: octaves(counts, zeros=zeros),
    st.dictionaries(st.integers(-14, 15), st.integers(1, 1000), min_size=1),
    st.integers(0, 1_000_000),
)


def hidden(*tensors, shift=0):
    return hidden_zeros([tally_of(seen) for seen in tensors], shift)


def lost(*tensors):
    return lost_share(tally_of(seen) for seen in tensors)


def drawn(middle, spread, true_zeros=0.0, count=20_000):
    """Return log-normal gradients in float16, and the share of zeros by flushing.

    Args:
        middle: log2 of their magnitude.
        spread: In octaves.
        true_zeros: The share that is truly 0.
        count: How many.
    """
    rng = random.Random(11)
    exact = [
        0.0 if rng.random() < true_zeros else 2.0 ** rng.gauss(middle, spread)
        for _ in range(count)
    ]
    left = [half(x) for x in exact]
    flushed = sum(x != 0.0 and y == 0.0 for x, y in zip(exact, left, strict=True))
    return histogram(left), flushed / count


# --- what is estimated ----------------------------------------------------------------


@pytest.mark.parametrize("true_zeros", [0.0, 0.3])
@pytest.mark.parametrize("middle", [-24.0, -22.0, -20.0, -17.0])
def test_a_spread_of_two_and_a_half_octaves_is_told_whatever_is_truly_0(
    middle, true_zeros
):
    seen, flushed = drawn(middle, 2.5, true_zeros)
    [told] = hidden(seen)
    # Bins stand for their middle, which is off by up to 0.2 octaves.
    assert told / seen.total == pytest.approx(flushed, abs=0.03)


@pytest.mark.parametrize("spread", [1.6, 2.0])
@pytest.mark.parametrize("middle", [-25.0, -23.0, -20.0])
def test_of_a_narrower_gradient_too_much_is_told_rather_than_too_little(middle, spread):
    seen, flushed = drawn(middle, spread, true_zeros=0.3)
    [told] = hidden(seen)
    assert flushed <= told / seen.total <= seen.zeros / seen.total


@pytest.mark.parametrize("middle", [-25.0, -23.0, -20.0])
def test_of_a_wider_gradient_at_least_half_is_told(middle):
    seen, flushed = drawn(middle, 2.8)
    [told] = hidden(seen)
    assert flushed / 2 < told / seen.total <= flushed


def test_half_of_the_smallest_count_whatever_lies_further_up():
    assert hidden(octaves({-24: 21, 10: 900}, zeros=400)) == [10]
    assert hidden(octaves({-24: 21, 10: 900}, zeros=4)) == [4]


@given(HISTOGRAMS)
def test_no_more_zeros_count_than_there_are(seen):
    [told] = hidden(seen)
    assert 0 <= told <= seen.zeros


@given(HISTOGRAMS, st.integers(0, 20))
def test_a_higher_scale_flushes_no_more(seen, shift):
    assert hidden(seen, shift=shift + 1) <= hidden(seen, shift=shift)


@given(st.integers(0, 5000), st.integers(0, 9))
def test_gradients_that_are_further_down_have_lost_no_less(zeros, place):
    lower, higher = (
        octaves({place + e - 24: 100 for e in range(3)}, zeros=zeros)
        for place in (place, place + 1)
    )
    assert hidden(lower) >= hidden(higher)


@pytest.mark.parametrize("smaller", [{"deep": 1}, {"counts": {-24: 20, -25: 1}}])
def test_a_gradient_with_smaller_elements_than_float16_has_was_never_flushed(smaller):
    assert hidden(octaves(**{"counts": {-24: 20}, "zeros": 9, **smaller})) == [0]


# --- true zeros -----------------------------------------------------------------------


@given(st.lists(WELL_WITHIN, min_size=1, max_size=5))
def test_zeros_at_a_healthy_scale_are_true_ones_however_many(tensors):
    assert lost(*tensors, NOTHING) == 0.0


def test_half_of_a_relu_a_few_octaves_above_the_border_is_truly_0():
    seen, flushed = drawn(-14.0, 2.0, true_zeros=0.5)
    assert flushed < 0.001
    assert lost(seen) < 0.001


def test_an_embedding_loses_no_more_than_its_rows_in_use_could():
    # 1 % of the rows are in use, and half of their elements were flushed.
    [told] = hidden(octaves({-24: 250, -23: 150, -22: 100}, zeros=99_500))
    assert 300 < told < 1500


# --- gradients of zeros alone ---------------------------------------------------------


def test_zeros_alone_count_where_another_gradient_is_sinking():
    sinking = octaves({-24: 300, -23: 200, -22: 100, 0: 1}, zeros=400)
    assert hidden(NOTHING, sinking)[0] == 100


def test_zeros_alone_count_where_nothing_is_normal():
    low = octaves({-20: 300, -16: 200})
    assert hidden(NOTHING, low) == [100, 0]
    assert hidden(NOTHING, low, octaves({-14: 1})) == [0, 0, 0]


@pytest.mark.parametrize(
    "other",
    [
        octaves({-24: 300, -23: 200, -22: 100, 0: 1}, zeros=30),
        octaves({-15: 300, -14: 200, -13: 100}, zeros=4000),
        octaves({-24: 300, -23: 200, 0: 1}, zeros=400, deep=1),
    ],
    ids=["hardly a zero", "well within", "never float16"],
)
def test_zeros_alone_are_true_where_no_other_gradient_is_sinking(other):
    assert hidden(NOTHING, other)[0] == 0


def test_a_few_elements_that_sink_are_no_evidence_for_many():
    noise = octaves({-24: 30, -23: 20, 0: 1}, zeros=49)
    assert hidden(octaves({}, zeros=10_000), noise)[0] == 10_000
    assert hidden(octaves({}, zeros=10_001), noise)[0] == 0


def test_nothing_but_zeros_tells_nothing():
    assert hidden(NOTHING, NOTHING) == [0, 0]
    assert lost(NOTHING) == 0.0


def test_what_becomes_of_zeros_alone_at_a_higher_scale_is_left_open():
    sinking = octaves({-24: 300, -23: 200, -22: 100, 0: 1}, zeros=400)
    assert hidden(NOTHING, sinking, shift=12) == [100, 0]


# --- the share ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "share"),
    [
        ([], 0.0),
        ([octaves({})], 0.0),
        ([octaves({-26: 30, 0: 70}, zeros=50)], 0.3),
        ([octaves({-25: 30, 0: 70})], 0.3),
        ([octaves({-24: 20, 0: 70}, zeros=50)], 0.1),
        ([octaves({-24: 20, 0: 70}, zeros=50, nonfinite=9)], 0.1),
        ([octaves({-26: 30, 0: 70}), octaves({-24: 20, 0: 70}, zeros=50)], 0.2),
    ],
    ids=["none", "empty", "told", "at 2^-25", "hidden", "not finite", "both"],
)
def test_the_share_that_is_lost_has_what_is_told_and_what_is_hidden(tensors, share):
    assert lost(*tensors) == share


@given(HISTOGRAMS)
def test_a_run_file_tells_the_same(seen):
    bins = seen.bins[19:]
    sample = TensorSample(
        seen.total, seen.zeros, 0, bins, sum(seen.bins[:19]) + seen.deep, seen.above
    )
    assert tally_of(histogram_of(sample, seen.scale)) == tally_of(seen)


def test_a_tally_counts_by_octaves_above_the_smallest_float16():
    seen = octaves({-25: 1, -24: 2, -22: 3, -14: 4}, zeros=5, deep=6, above=7)
    assert tally_of(seen) == Tally(5, 7, 2, 16, 3 * 2 + 4 * 10 + 7 * 40, 11)
