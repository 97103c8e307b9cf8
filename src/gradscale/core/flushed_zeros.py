"""Estimates how many zeros of a sample a float16 backward pass has flushed.

One sample cannot distinguish flushed zeros from true ones. The estimate relies on
common properties of gradients:

The logarithms of the magnitudes of one gradient are roughly normally distributed, with
a standard deviation of `SPREAD` octaves. Float16 cuts off values below 2^-25. The
closer the remaining elements are to that border, the more are missing: as many as
remain if their mean is 2 octaves above it, 1 in 13 at 4, and a negligible number at 8.
Zeros beside elements well within the float16 range are therefore true zeros, however
many: in a ReLU, in embedding rows that the batch does not use, in a factor that is
still 0. The estimate never exceeds the number of zeros. It is too high for narrower
gradients with true zeros, and too low for wider ones, by up to a half.

Near 0, densities are flat: elements of the smallest float16, rounded from 1/2 to 3/2 of
it, imply half as many below 1/2. This is a lower bound of the estimate.

An all-zero gradient has no mean exponent. It is counted as flushed if other gradients
of the same sample are close to the float16 minimum: one of them is sinking, with a mean
within two spreads of the border and a twentieth of it 0, or none of them reaches the
normal float16 range. Otherwise its zeros are true: of a factor that is still 0, or of a
part that does not affect the loss. A few sinking elements are no evidence for many: the
gradient of a bias that cancels out is only rounding error, at any scale.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import erfc, exp, pi, sqrt
from typing import NamedTuple

from gradscale.core.exponent_histogram import NORMAL_FROM, Histogram

# The standard deviation of log2 of magnitudes. Gaussian numbers have 1.6; weight
# gradients had 1.4 to 3.4, the most where rows differ:
# tests/torch/underflow/test_flushed_zeros.py.
SPREAD = 2.5
# A sinking gradient has its mean within SINKING spreads of the border, and at least
# this share of zeros.
SINKING = 2.0
SUNK = 0.05
# Sinking elements required for each element of an all-zero gradient.
EVIDENCE = 0.01
# The number of elements of a gradient that counts as a layer.
LAYER = 16
# The smallest float16 is 2^-24. Values that round to it are from 2^-25 to 1.5 * 2^-24,
# on average 0.8 octaves above the border; those of the n-th bin after it, n + 1.4.
_SMALLEST = -24
_FIRST_BIN, _LATER_BINS = 0.8, 1.4


class Tally(NamedTuple):
    """The counts of one gradient that the estimate needs.

    Attributes:
        zeros: Elements that are exactly 0.
        below: Magnitudes in (0, 2^-24).
        smallest: Magnitudes in [2^-24, 2^-23).
        kept: Finite magnitudes of 2^-24 and more, including `smallest`.
        octaves: The sum of their bin indices, counted from the bin of 2^-24.
        normal: Magnitudes among them that are normal float16, or larger.
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
    octaves = sum(index * count for index, count in enumerate(bins))
    return Tally(
        zeros=seen.zeros,
        below=seen.deep + sum(seen.bins[:first]),
        smallest=bins[0],
        kept=kept,
        octaves=octaves + len(bins) * seen.above,
        normal=sum(bins[NORMAL_FROM - _SMALLEST :]) + seen.above,
    )


def hidden_zeros(tensors: Sequence[Tally], shift: int = 0) -> list[int]:
    """Estimate how many zeros of each gradient were flushed in backward.

    0 for a gradient with elements below 2^-24: it was never float16.

    >>> flushed = Tally(400, 0, 350, kept=600, octaves=450, normal=9)
    >>> true = Tally(400, 0, 0, kept=600, octaves=6000, normal=350)
    >>> nothing = Tally(100, 0, 0, 0, 0, 0)
    >>> hidden_zeros([flushed, nothing]), hidden_zeros([true, nothing])
    ([400, 100], [0, 0])

    Args:
        tensors: All gradients of one step.
        shift: Estimate for 2^shift times the scale of the sample; 0 or more. An
            all-zero gradient counts as unchanged.
    """
    sinks = _all_sink(tensors)
    return [
        each.zeros if sinks and _is_nothing(each) else _flushed(each, shift)
        for each in tensors
    ]


def lost_share(tensors: Iterable[Tally]) -> float:
    """Return the share of elements that are too small for float16.

    The elements below 2^-24 and the estimated flushed zeros, relative to all finite
    elements that are not true zeros.

    >>> lost_share([Tally(400, 0, 350, kept=600, octaves=450, normal=9)])
    0.4
    >>> lost_share([Tally(400, below=3, smallest=0, kept=597, octaves=6000, normal=9)])
    0.005
    """
    every = list(tensors)
    lost = sum(hidden_zeros(every)) + sum(each.below for each in every)
    return lost / max(lost + sum(each.kept for each in every), 1)


def lost_layer(names: Sequence[str], tensors: Sequence[Tally]) -> str:
    """Return the name of the largest gradient that has lost most of its elements.

    One that is exactly 0 throughout counts too. Empty if there is none; small tensors,
    such as biases, are left out.

    >>> lost_layer(["a", "b"], [Tally(0, 0, 0, 99, 999, 99), Tally(99, 0, 0, 0, 0, 0)])
    'b'
    """
    flushed = hidden_zeros(tensors)
    sizes = [
        (each.zeros + each.kept + each.below, name)
        for name, each, hidden in zip(names, tensors, flushed, strict=True)
        if _is_nothing(each) or hidden + each.below > each.kept
    ]
    size, name = max(sizes, default=(0, ""))
    return name if size >= LAYER else ""


def _all_sink(tensors: Sequence[Tally]) -> bool:
    """Return whether all-zero gradients count as flushed."""
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
    """Return the mean distance of kept elements from the border, in octaves."""
    first = (_LATER_BINS - _FIRST_BIN) * tally.smallest
    return (tally.octaves - first) / tally.kept + _LATER_BINS


def _missing(mean: float) -> float:
    """Return the number of missing elements per remaining element.

    Args:
        mean: The mean distance of the remaining elements from the border, in spreads.
    """
    index = bisect_left(_MEANS, mean)
    if index in (0, len(_MEANS)):
        return _RATIOS[0] if index == 0 else 0.0
    before, after = _MEANS[index - 1], _MEANS[index]
    part = (mean - before) / (after - before)
    return _RATIOS[index - 1] * (1.0 - part) + _RATIOS[index] * part


def _cut_off(border: float) -> tuple[float, float]:
    """Return the properties of a normal distribution truncated at a border.

    Returns:
        The mean above the border, measured from it, and the ratio of the mass below
        to the mass above.
    """
    above = 0.5 * erfc(border / sqrt(2.0))
    density = exp(-0.5 * border * border) / sqrt(2.0 * pi)
    return density / above - border, (1.0 - above) / above


# Borders from 2 deviations above the mean, where nearly all is missing, to 5 below it.
# Linear interpolation between them is accurate to 1 %.
_KNOTS = [_cut_off(border / 20.0) for border in range(40, -101, -1)]
_MEANS = [mean for mean, _ in _KNOTS]
_RATIOS = [ratio for _, ratio in _KNOTS]
