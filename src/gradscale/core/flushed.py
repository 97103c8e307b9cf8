"""How many gradients a backward pass has flushed to 0, told from two scales.

What float16 has rounded to 0 looks like a true zero. But a true zero is 0 at every
scale, and what was flushed at one scale appears at a higher one. So the zeros that two
samples differ by were flushed; what is flushed at the higher scale too is
extrapolated.

Float16 rounds to multiples of 2^-24: zeros are what was below 1/2 of it, the first bin
what was below 3/2. In units of the lower scale, two samples so tell how many elements
lie below 1/2 of it, below 3/2, and below 1/2 over the ratio of the scales. Through
these three goes one power of the border, true zeros added.
"""

from collections.abc import Iterable
from itertools import pairwise
from math import frexp, ldexp
from typing import NamedTuple

from gradscale.core.exponent_histogram import Histogram, shift_between
from gradscale.core.formatting import percent, power
from gradscale.errors import ConfigError

# Near 0, densities are flat: as many elements lie below a border as it is high.
FLAT = 1.0
# Fewer elements than this tell no power: it would be off by a fifth and more.
ENOUGH = 100
# Powers that are looked for. Towards 0, no end of the elements is in sight.
_LEAST, _MOST = 0.05, 8.0
# Two samples of one distribution differ by less: by chance, and by the lines drawn
# between the borders of float16.
DRIFTED = 0.1


class Flushed(NamedTuple):
    """What two samples of one tensor at two scales tell. Shares of all elements.

    Attributes:
        low_scale, high_scale: The two scales.
        at_least: Flushed at the lower one for certain: the zeros that are none at the
            higher one.
        at_low: Flushed at the lower one: `at_least` and `at_high`.
        at_high: Flushed at the higher one too, extrapolated. Too much, rather than too
            little, where gradients are spread over many octaves.
        true_zeros: Zeros at the higher scale that are not taken for flushed.
        drift: How far the two samples differ once the scale is taken out: the most
            by which the shares below one magnitude lie apart.
        told: Towards 0 elements become fewer; else `at_high` is as much as it can be,
            all zeros.
    """

    low_scale: float
    high_scale: float
    at_least: float
    at_low: float
    at_high: float
    true_zeros: float
    drift: float
    told: bool

    @property
    def reliable(self) -> bool:
        """The two samples are of much the same gradients, and there is an end."""
        return self.told and self.drift <= DRIFTED

    def __str__(self) -> str:
        low, high = power(self.low_scale), power(self.high_scale)
        if self.drift > DRIFTED:
            return (
                f"the samples at S = {low} and {high} differ by too much to tell "
                "flushed zeros from true ones"
            )
        if not self.told:
            return (
                f"by the samples at S = {low} and {high}, backward flushed "
                f"{percent(self.at_least)} to {percent(self.at_low)} of the elements "
                f"at {low}; which zeros are true ones cannot be told"
            )
        return (
            f"by an estimate from S = {low} and {high}, backward flushed about "
            f"{percent(self.at_low)} of the elements at {low}, "
            f"{percent(self.at_least)} at least, and {percent(self.at_high)} at "
            f"{high}; about {percent(self.true_zeros)} are true zeros"
        )


def estimate_flushed(sample_low: Histogram, sample_high: Histogram) -> Flushed:
    """Estimate what backward has flushed to 0, from samples at two scales.

    The samples should be of steps close to each other: the scaler's own moves give
    such pairs. They are of float16, or of values that were float16 before.

    >>> low = Histogram(1.0, 700, 0, -24, (800, 1600, 3200, 3700), 0, 0)
    >>> high = Histogram(2.0, 500, 0, -24, (400, 800, 1600, 3200, 3500), 0, 0)
    >>> told = estimate_flushed(low, high)
    >>> round(told.at_low, 3), round(told.at_high, 3), round(told.true_zeros, 3)
    (0.04, 0.02, 0.03)

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
    exponent = _power(appeared, sample_low, octaves)
    still = zeros_high
    if exponent is not None:
        still = min(appeared / (2.0 ** (exponent * octaves) - 1.0), zeros_high)
    return Flushed(
        sample_low.scale,
        sample_high.scale,
        at_least=appeared,
        at_low=appeared + still,
        at_high=still,
        true_zeros=zeros_high - still,
        drift=_drift(sample_low, sample_high, octaves),
        told=exponent is not None,
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


def _power(appeared: float, low: Histogram, octaves: int) -> float | None:
    """Return the power of the border that elements below it grow with.

    None if it is 0 or less: elements would not become fewer towards 0.
    """
    first = low.between(-24, -23)
    if min(appeared * low.total, first) < ENOUGH:
        return FLAT
    ratio = first / (appeared * low.total)
    under, over = _LEAST, _MOST
    if _ratio(under, octaves) >= ratio:
        return None
    # The ratio rises with the power. 2^-30 of the range is more than enough.
    for _ in range(30):
        middle = (under + over) / 2.0
        if _ratio(middle, octaves) < ratio:
            under = middle
        else:
            over = middle
    return under


def _ratio(exponent: float, octaves: int) -> float:
    """Return (elements from 1/2 to 3/2) / (those below 1/2 that appear higher up)."""
    ratio: float = (3.0**exponent - 1.0) / (1.0 - 0.5 ** (exponent * octaves))
    return ratio


def _drift(low: Histogram, high: Histogram, octaves: int) -> float:
    """Return how far the shares below one border lie apart, at most."""
    borders = [ldexp(1.0, exponent) - 0.5 for exponent in range(40 - octaves)]
    pairs = [
        (_below(low, border), _below(high, ldexp(border, octaves)))
        for border in borders
    ]
    return max(abs(ours - theirs) for ours, theirs in pairs)


def _below(seen: Histogram, border: float) -> float:
    """Return the share of elements that were smaller than a border before rounding.

    Exact where float16 has its own borders, and along a line between two of them.

    Args:
        seen: The histogram.
        border: In units of 2^-24, at least 1/2.
    """
    exponent = frexp(border + 0.5)[1] - 1
    before, after = (ldexp(1.0, each) - 0.5 for each in (exponent, exponent + 1))
    first = exponent - 24
    # Magnitudes are rounded to no less than 2^first from `before` on.
    rest = seen.above + seen.nonfinite + seen.between(first, first + 64)
    part = seen.between(first, first + 1) * (border - before) / (after - before)
    return 1.0 - (rest - part) / seen.total
