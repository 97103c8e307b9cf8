"""How many zeros of a sample a backward pass in float16 has probably flushed.

One sample cannot tell a flushed zero from a true one, so this is an estimate. It
stands on what gradients have in common:

The magnitudes of one gradient lie around their middle, `SPREAD` octaves wide, much as
a normal distribution of their logarithms. Float16 cuts off what lies below 2^-25. The
closer to that border the elements are that are left, the more are missing: as many as
are left if their mean is 2 octaves above it, 1 in 13 at 4, and none that would matter
at 8. So zeros beside elements well within float16 are true ones, however many: those
of a ReLU, of rows that no batch has asked for, of a factor that is still 0. No more
zeros count than there are. For gradients that are narrower it is too much where there
are true zeros to take, and for wider ones too little, by up to a half.

Near 0, densities are flat, whatever lies further up: where there are elements of the
smallest float16, rounded from 1/2 to 3/2 of it, half as many lay below 1/2. So many
count at least.

A gradient of zeros alone has no such mean. But backward goes from layer to layer, so
it counts as flushed where the others of the sample are on their way down: one of them
is sinking, with a mean within two spreads of the border and a twentieth of it 0, or
none of them reaches the normal float16. Else its zeros are true: a factor that is
still 0, a part that has no say. A few elements that sink are no evidence for many: a
bias whose gradient cancels out is nothing but rounding, at any scale.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import erfc, exp, pi, sqrt
from typing import NamedTuple

from gradscale.core.exponent_histogram import NORMAL_FROM, Histogram

# The standard deviation of log2 of magnitudes. Gaussian numbers have 1.6; gradients of
# weights had 1.4 to 3.4, most where rows differ:
# tests/torch/underflow/test_flushed_zeros.py.
SPREAD = 2.5
# How many spreads above the border a gradient sinks, and how much of it is 0 then.
SINKING = 2.0
SUNK = 0.05
# As many elements must sink for each that is in a gradient of zeros alone.
EVIDENCE = 0.01
# The smallest float16 is 2^-24. What is rounded to it lies from 2^-25 to 1.5 * 2^-24,
# 0.8 octaves above the border in the middle; in the n-th bin after it, n + 1.4.
_SMALLEST = -24
_FIRST_BIN, _LATER_BINS = 0.8, 1.4


class Tally(NamedTuple):
    """What one gradient of a sample looks like, in whole numbers.

    Attributes:
        zeros: Elements that are exactly 0.
        below: Magnitudes in (0, 2^-24).
        smallest: Magnitudes in [2^-24, 2^-23).
        kept: Finite magnitudes of 2^-24 and more, those included.
        octaves: How many bins above that of 2^-24 those are, added up.
        normal: Those among them that are normal float16, or larger.
    """

    zeros: int
    below: int
    smallest: int
    kept: int
    octaves: int
    normal: int


def tally_of(seen: Histogram) -> Tally:
    """Return the tally of a histogram.

    >>> tally_of(Histogram(1.0, 7, 1, -25, (2, 10, 20, 5), 0, 0))
    Tally(zeros=7, below=3, smallest=10, kept=35, octaves=30, normal=0)
    """
    first = _SMALLEST - seen.lowest
    bins = seen.bins[first:]
    kept = sum(bins) + seen.above
    octaves = sum(place * count for place, count in enumerate(bins))
    return Tally(
        zeros=seen.zeros,
        below=seen.deep + sum(seen.bins[:first]),
        smallest=bins[0],
        kept=kept,
        octaves=octaves + len(bins) * seen.above,
        normal=sum(bins[NORMAL_FROM - _SMALLEST :]) + seen.above,
    )


def hidden_zeros(tensors: Sequence[Tally], shift: int = 0) -> list[int]:
    """Estimate how many zeros of each gradient backward has flushed.

    None where there are elements below 2^-24: such a gradient never was float16.

    >>> flushed = Tally(400, 0, 350, kept=600, octaves=450, normal=9)
    >>> true = Tally(400, 0, 0, kept=600, octaves=6000, normal=350)
    >>> nothing = Tally(100, 0, 0, 0, 0, 0)
    >>> hidden_zeros([flushed, nothing]), hidden_zeros([true, nothing])
    ([400, 100], [0, 0])

    Args:
        tensors: All gradients of one step.
        shift: At the scale 2^shift times theirs, 0 or more. What becomes of a
            gradient of zeros alone is not known there: it stays as it is.
    """
    sinks = _all_sink(tensors)
    return [
        each.zeros if sinks and _is_nothing(each) else _flushed(each, shift)
        for each in tensors
    ]


def lost_share(tensors: Iterable[Tally]) -> float:
    """Return the share of elements that are too small for float16.

    Those below 2^-24, and the zeros that backward seems to have flushed; of all that
    are finite and not truly 0.

    >>> lost_share([Tally(400, 0, 350, kept=600, octaves=450, normal=9)])
    0.4
    >>> lost_share([Tally(400, below=3, smallest=0, kept=597, octaves=6000, normal=9)])
    0.005
    """
    every = list(tensors)
    lost = sum(hidden_zeros(every)) + sum(each.below for each in every)
    return lost / max(lost + sum(each.kept for each in every), 1)


def _all_sink(tensors: Sequence[Tally]) -> bool:
    """Tell whether gradients of zeros alone are where the others are on their way."""
    nothing = sum(each.zeros for each in tensors if _is_nothing(each))
    if not nothing:
        return False
    if not any(each.normal for each in tensors):
        return any(each.kept for each in tensors)
    sinking = sum(each.zeros + each.kept for each in tensors if _sinks(each))
    return sinking >= EVIDENCE * nothing


def _is_nothing(tally: Tally) -> bool:
    return tally.zeros > 0 and not (tally.kept or tally.below)


def _sinks(tally: Tally) -> bool:
    if tally.below or not tally.kept:
        return False
    enough = tally.zeros >= SUNK * (tally.zeros + tally.kept)
    return enough and _mean(tally) <= SINKING * SPREAD


def _flushed(tally: Tally, shift: int) -> int:
    if not (tally.zeros and tally.kept) or tally.below:
        return 0
    missing = _missing((_mean(tally) + shift) / SPREAD)
    flat = tally.smallest >> (1 + shift)
    return min(tally.zeros, max(int(tally.kept * missing), flat))


def _mean(tally: Tally) -> float:
    """Return how many octaves above the border those are that are left."""
    first = (_LATER_BINS - _FIRST_BIN) * tally.smallest
    return (tally.octaves - first) / tally.kept + _LATER_BINS


def _missing(mean: float) -> float:
    """Return how many are missing for each that is left.

    Args:
        mean: Of those that are left, above the border, in deviations.
    """
    place = bisect_left(_MEANS, mean)
    if place in (0, len(_MEANS)):
        return _RATIOS[0] if place == 0 else 0.0
    before, after = _MEANS[place - 1], _MEANS[place]
    part = (mean - before) / (after - before)
    return _RATIOS[place - 1] * (1.0 - part) + _RATIOS[place] * part


def _cut_off(border: float) -> tuple[float, float]:
    """Return what a normal distribution is above a border, in deviations.

    Returns:
        The mean of what is above, measured from the border, and how much is below
        for each above.
    """
    above = 0.5 * erfc(border / sqrt(2.0))
    density = exp(-0.5 * border * border) / sqrt(2.0 * pi)
    return density / above - border, (1.0 - above) / above


# Borders from 2 deviations above the middle, where nearly all is missing, to 5 below
# it. Lines between them are right to 1 %.
_KNOTS = [_cut_off(border / 20.0) for border in range(40, -101, -1)]
_MEANS = [mean for mean, _ in _KNOTS]
_RATIOS = [ratio for _, ratio in _KNOTS]
