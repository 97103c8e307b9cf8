"""What float16 loses at a scale, told from a histogram of exponents.

A gradient that is multiplied by 2 moves up by one bin, and by nothing else. So the
histogram at one scale tells what float16 would do at every other power of two of it:
below 2^-25 an element is rounded to 0, below 2^-14 it is subnormal and has fewer
digits, from 65520 on it is rounded to infinity (the largest float16 is 65504).

Zeros do not move. Those that were flushed inside a backward pass in float16 look like
true zeros, whatever is measured afterwards; `gradscale.core.flushed_zeros` estimates
how many they are.
"""

from collections.abc import Iterable, Sequence
from math import frexp
from typing import NamedTuple, Protocol

from gradscale.errors import ConfigError

# Exponents: 2^-25 and less is rounded to 0, from 2^-14 on numbers are normal, and
# those of 2^16 and more do not fit.
FLUSHED_BELOW, NORMAL_FROM, TOO_LARGE_FROM = -25, -14, 16
# Half a step above 65504, the largest float16: rounded to infinity.
INFINITE_FROM = 65520.0
# The share of elements that a scale may lose without advice to raise it.
TOLERATED = 0.003


class Counted(Protocol):
    """What a sample in a run file has; `gradscale.runfile.TensorSample` is one."""

    @property
    def zeros(self) -> int:
        """Elements that are exactly 0."""

    @property
    def histogram(self) -> Sequence[int]:
        """Bin i counts magnitudes in [2^(i - 24), 2^(i - 23))."""

    @property
    def below(self) -> int:
        """Magnitudes in (0, 2^-24)."""

    @property
    def above(self) -> int:
        """Finite magnitudes of 2^16 and more."""

    @property
    def nonfinite(self) -> int:
        """Elements that are inf or NaN."""


class Histogram(NamedTuple):
    """Magnitudes of gradients by their exponents.

    Attributes:
        scale: The scale that is in them.
        zeros: Elements that are exactly 0.
        deep: Elements below the first bin, but for zeros.
        lowest: The exponent of the first bin.
        bins: Bin i counts magnitudes in [2^(lowest + i), 2^(lowest + i + 1)).
        above: Finite elements beyond the last bin.
        nonfinite: inf and NaN.
    """

    scale: float
    zeros: int
    deep: int
    lowest: int
    bins: Sequence[int]
    above: int
    nonfinite: int

    @property
    def total(self) -> int:
        """All elements."""
        return self.zeros + self.nonzero + self.nonfinite

    @property
    def nonzero(self) -> int:
        """Elements that are finite and not 0."""
        return self.deep + sum(self.bins) + self.above

    def between(self, low: int, high: int) -> int:
        """Return how many binned magnitudes are in [2^low, 2^high)."""
        first, last = max(low - self.lowest, 0), max(high - self.lowest, 0)
        return sum(self.bins[first:last])


def histogram_of(sample: Counted, scale: float) -> Histogram:
    """Return the histogram of a sample from a run file.

    Args:
        sample: What was counted.
        scale: The scale of the step that was sampled.
    """
    return Histogram(
        scale,
        sample.zeros,
        sample.below,
        -24,
        sample.histogram,
        sample.above,
        sample.nonfinite,
    )


def pooled(histograms: Iterable[Histogram]) -> Histogram:
    """Return the sum of histograms that are of one scale and have the same bins.

    >>> one = Histogram(1.0, 3, 0, -1, (5, 6), 0, 0)
    >>> pooled([one, one]).bins
    (10, 12)
    """
    every = list(histograms)
    if len({(each.scale, each.lowest, len(each.bins)) for each in every}) != 1:
        raise ConfigError(
            f"{len(every)} histograms cannot be added up. Their bins mean the same "
            "only at one scale and with one set of bins. Pass those of one step, at "
            "least one.",
            code="GS101",
        )
    return every[0]._replace(
        zeros=sum(each.zeros for each in every),
        deep=sum(each.deep for each in every),
        bins=tuple(map(sum, zip(*(each.bins for each in every), strict=True))),
        above=sum(each.above for each in every),
        nonfinite=sum(each.nonfinite for each in every),
    )


class Fate(NamedTuple):
    """What becomes of the elements in float16 at one scale.

    Attributes:
        scale: That scale.
        zeros: Elements that were 0 already, whether truly or flushed in backward.
        flushed: Elements that are rounded to 0.
        degraded: Elements that are subnormal: they have fewer than 11 bits.
        normal: Elements that keep all digits.
        overflowed: Elements that become infinite.
        nonfinite: Elements that were inf or NaN already.
    """

    scale: float
    zeros: int
    flushed: int
    degraded: int
    normal: int
    overflowed: int
    nonfinite: int

    @property
    def lost(self) -> float:
        """The share of the elements that are finite and not 0 that is rounded to 0."""
        return self.flushed / max(self._nonzero, 1)

    @property
    def coarse(self) -> float:
        """The share of them that is subnormal."""
        return self.degraded / max(self._nonzero, 1)

    @property
    def _nonzero(self) -> int:
        return self.flushed + self.degraded + self.normal + self.overflowed


def fate(seen: Histogram, shift: int = 0) -> Fate:
    """Return what float16 makes of the elements at the scale 2^shift times theirs.

    Exact, but for magnitudes of exactly 2^-25 (taken for 2^-24, they become 0) and
    from 65520 to 65536 (taken for finite, they become infinite). Elements outside of
    the bins count as lost, or as too large, at every scale: where they are is not
    known. Of gradients that float16 has rounded before, the bins below 2^-20 tell of
    lower scales only roughly.

    >>> fate(Histogram(1.0, 5, 0, -26, (60, 20, 20), 0, 0)).lost
    0.6
    >>> fate(Histogram(1.0, 5, 0, -26, (60, 20, 20), 0, 0), shift=1).lost
    0.0
    """
    flush, normal, large = (
        exponent - shift for exponent in (FLUSHED_BELOW, NORMAL_FROM, TOO_LARGE_FROM)
    )
    end = seen.lowest + len(seen.bins)
    return Fate(
        scale=seen.scale * 2.0**shift,
        zeros=seen.zeros,
        flushed=seen.deep + seen.between(seen.lowest, flush),
        degraded=seen.between(flush, normal),
        normal=seen.between(normal, large),
        overflowed=seen.above + seen.between(large, max(end, large)),
        nonfinite=seen.nonfinite,
    )


def shift_between(low: float, high: float) -> int:
    """Return the exponent of high / low, which must be a power of two.

    >>> shift_between(1.0, 4096.0), shift_between(1000.0, 250.0)
    (12, -2)
    """
    (fraction, exponent), (other, base) = frexp(high), frexp(low)
    if fraction != other:
        raise ConfigError(
            f"The scales {low:g} and {high:g} are no power of two apart. Between them "
            "elements change within a bin, which the histogram does not show. Pass "
            f"{low:g} times a power of two.",
            code="GS101",
        )
    return exponent - base


def largest_scale(seen: Histogram, peak: float | None = None) -> float | None:
    """Return the largest scale at which nothing overflows; None if it is not known.

    Of those that are a power of two times the scale of the histogram.

    >>> largest_scale(Histogram(1.0, 5, 0, -26, (60, 20, 20), 0, 0)) == 2.0**39
    True

    Args:
        seen: Its highest filled bin is moved to the last octave of float16, whose
            uppermost 1/2048 is taken for finite.
        peak: The largest magnitude, which makes it exact.
    """
    if seen.nonfinite or not seen.nonzero:
        return None
    if peak is not None:
        shift = frexp(INFINITE_FROM)[1] - frexp(peak)[1]
        return seen.scale * 2.0 ** (shift - (peak * 2.0**shift >= INFINITE_FROM))
    filled = [place for place, count in enumerate(seen.bins) if count]
    if seen.above or not filled:
        return None
    return seen.scale * 2.0 ** (TOO_LARGE_FROM - 1 - seen.lowest - filled[-1])
