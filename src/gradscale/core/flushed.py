"""How many gradients a backward pass has flushed to 0, told from two scales.

What float16 has rounded to 0 looks like a true zero. But a true zero is 0 at every
scale, and what was flushed at one scale appears at a higher one. So the zeros that two
samples differ by were flushed; what is flushed at the higher scale too is
extrapolated.
"""

from collections.abc import Iterable
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

from gradscale.core.findings import power
from gradscale.core.scale_advice import percent
from gradscale.core.underflow import Histogram, shift_between
from gradscale.errors import ConfigError

# Near 0, densities are flat: twice as many elements with each octave.
FLAT = 2.0
# Fewer elements than this tell no slope: it would be off by a fifth and more.
ENOUGH = 100
# The octaves whose slope is carried on. Closer to 0, rounding moves elements from one
# to the other; beyond, the slope is not that of the smallest ones any more.
_LOW, _MIDDLE, _HIGH = -23, -21, -19
# Where two samples of one distribution agree but for chance.
DRIFTED = 0.1


class Flushed(NamedTuple):
    """What two samples of one tensor at two scales tell. Shares of all elements.

    Attributes:
        low_scale, high_scale: The two scales.
        at_low: Flushed at the lower one; what both differ by, and `at_high`.
        at_high: Flushed at the higher one too; extrapolated.
        true_zeros: Zeros at the higher scale that are not taken for flushed.
        drift: How far the two differ where nothing is flushed: 0 for the same
            gradients, 1 for gradients that have nothing in common.
        told: There was a slope to be carried on; else `at_high` is as much as it can
            be, all zeros.
    """

    low_scale: float
    high_scale: float
    at_low: float
    at_high: float
    true_zeros: float
    drift: float
    told: bool

    @property
    def reliable(self) -> bool:
        """The two samples are of much the same gradients, and there was a slope."""
        return self.told and self.drift <= DRIFTED

    def __str__(self) -> str:
        unsure = "" if self.reliable else " (a guess: the two samples differ)"
        if not self.told:
            unsure = " (at most: the histogram does not fall off towards 0)"
        return (
            f"backward flushed {percent(self.at_low)} of the elements at "
            f"{power(self.low_scale)} and {percent(self.at_high)} at "
            f"{power(self.high_scale)}; {percent(self.true_zeros)} are true "
            f"zeros{unsure}"
        )


def estimate_flushed(sample_low: Histogram, sample_high: Histogram) -> Flushed:
    """Estimate what backward has flushed to 0, from samples at two scales.

    The samples should be of steps close to each other: the scaler's own moves give
    such pairs. With each octave towards 0 the elements become fewer by a factor that
    the histogram at the higher scale shows, and that is carried on.

    >>> low = Histogram(1.0, 50, 0, -24, (50, *[100 * 2**i for i in range(8)]), 0, 0)
    >>> high = Histogram(2.0, 25, 0, -24, (25, 50, *low.bins[1:]), 0, 0)
    >>> print(estimate_flushed(low, high))
    backward flushed 0.2 % of the elements at 2^0 and 0.1 % at 2^1; 0 % are true zeros

    Args:
        sample_low: At the lower scale.
        sample_high: At a power of two times that scale.
    """
    octaves = shift_between(sample_low.scale, sample_high.scale)
    if octaves < 1 or not (sample_low.total and sample_high.total):
        raise ConfigError(
            f"A sample at {power(sample_high.scale)} tells nothing about what was "
            f"flushed at {power(sample_low.scale)}. Only a higher scale shows what a "
            "lower one has flushed. Pass the sample of the lower scale first.",
            code="GS101",
        )
    zeros_low = sample_low.zeros / sample_low.total
    zeros_high = sample_high.zeros / sample_high.total
    # Below 0 by chance alone.
    appeared = max(zeros_low - zeros_high, 0.0)
    growth = _growth(sample_high)
    told = growth > 1.0
    still = zeros_high
    if told:
        still = min(appeared / (growth**octaves - 1.0), zeros_high)
    return Flushed(
        sample_low.scale,
        sample_high.scale,
        at_low=appeared + still,
        at_high=still,
        true_zeros=zeros_high - still,
        drift=_drift(sample_low, sample_high, octaves),
        told=told,
    )


def closest_pair(samples: Iterable[Histogram]) -> tuple[Histogram, Histogram] | None:
    """Return the latest two samples in a row of different scales, the lower first.

    Those that are not finite are passed over: the overflow that made the scale fall.
    None if the scale has not moved, or by no power of two.

    >>> first = Histogram(4.0, 1, 0, -1, (1, 1), 0, 0)
    >>> later = first._replace(scale=2.0)
    >>> closest_pair([first, later, later]) == (later, first)
    True
    """
    found = None
    for before, after in pairwise(each for each in samples if not each.nonfinite):
        if before.scale == after.scale:
            continue
        low, high = sorted((before, after), key=lambda each: each.scale)
        try:
            shift_between(low.scale, high.scale)
        except ConfigError:
            continue
        found = low, high
    return found


def _growth(seen: Histogram) -> float:
    """Return by how much each octave has more elements than the one below it."""
    lower = seen.between(_LOW, _MIDDLE)
    upper = seen.between(_MIDDLE, _HIGH)
    return FLAT if lower < ENOUGH else sqrt(upper / lower)


def _drift(low: Histogram, high: Histogram, octaves: int) -> float:
    """Return how far the two differ among elements that no scale has rounded much."""
    exponents = range(_LOW, 16 - octaves)
    ours = [low.between(each, each + 1) for each in exponents]
    theirs = [high.between(each + octaves, each + octaves + 1) for each in exponents]
    if not (sum(ours) and sum(theirs)):
        return 1.0
    pairs = zip(ours, theirs, strict=True)
    return sum(abs(a / sum(ours) - b / sum(theirs)) for a, b in pairs) / 2.0
