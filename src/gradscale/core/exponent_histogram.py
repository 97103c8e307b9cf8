"""Histograms of exponents, and the losses of float16 at other scales.

Multiplying a gradient by 2 moves it up by exactly one bin. The histogram at one scale
therefore predicts the effect of float16 at every power of two times that scale: below
2^-25 an element rounds to 0, below 2^-14 it is subnormal and has fewer digits, from
65520 on it rounds to infinity (the largest float16 is 65504).

Zeros do not move. Zeros that were flushed inside a float16 backward pass cannot be
distinguished from true zeros; `gradscale.core.flushed_zeros` estimates their number.
"""

from collections.abc import Iterable, Sequence
from math import frexp
from typing import NamedTuple, Protocol

from gradscale.errors import ConfigError

# Exponents: values below 2^-25 round to 0, from 2^-14 on they are normal, from 2^16 on
# they do not fit.
FLUSHED_BELOW, NORMAL_FROM, TOO_LARGE_FROM = -25, -14, 16
# Halfway above 65504, the largest float16: rounds to infinity.
INFINITE_FROM = 65520.0
# The share of elements that may be lost without advice to raise the scale.
TOLERATED = 0.003


class Counted(Protocol):
    """The counts of a sample, such as `gradscale.runfile.TensorSample`."""

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
        scale: The scale of the gradients.
        zeros: Elements that are exactly 0.
        deep: Non-zero elements below the first bin.
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
        """Return the number of binned magnitudes in [2^low, 2^high)."""
        first, last = max(low - self.lowest, 0), max(high - self.lowest, 0)
        return sum(self.bins[first:last])


def histogram_of(sample: Counted, scale: float) -> Histogram:
    """Return the histogram of a sample from a run file.

    Args:
        sample: The counts.
        scale: The scale of the sampled step.
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
    """Return the sum of histograms with the same scale and the same bins.

    >>> one = Histogram(1.0, 3, 0, -1, (5, 6), 0, 0)
    >>> pooled([one, one]).bins
    (10, 12)
    """
    every = list(histograms)
    if len({(each.scale, each.lowest, len(each.bins)) for each in every}) != 1:
        raise ConfigError(
            f"{len(every)} histograms cannot be added. Their bins are comparable only "
            "at one scale and with one set of bins. Pass at least one histogram, all "
            "of one step.",
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
    """Counts of elements by their float16 result at one scale.

    Attributes:
        scale: The scale.
        zeros: Elements that are 0 in the sample, true zeros or flushed in backward.
        flushed: Elements that round to 0.
        degraded: Elements that are subnormal, with fewer than 11 bits.
        normal: Elements with full precision.
        overflowed: Elements that become infinite.
        nonfinite: Elements that are inf or NaN in the sample.
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
        """The share of finite, non-zero elements that round to 0."""
        return self.flushed / max(self._nonzero, 1)

    @property
    def coarse(self) -> float:
        """The share of finite, non-zero elements that are subnormal."""
        return self.degraded / max(self._nonzero, 1)

    @property
    def _nonzero(self) -> int:
        return self.flushed + self.degraded + self.normal + self.overflowed


def fate(seen: Histogram, shift: int = 0) -> Fate:
    """Return the float16 results of the elements at 2^shift times their scale.

    Exact, except for magnitudes of exactly 2^-25 (counted as 2^-24, they become 0) and
    from 65520 to 65536 (counted as finite, they become infinite). Elements outside the
    bins count as lost, or as too large, at every scale: their exponents are unknown.
    For gradients that float16 has already rounded, the bins below 2^-20 predict lower
    scales only roughly.

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
            f"The ratio of the scales {low:g} and {high:g} is not a power of two. "
            "Elements would move within a bin, which the histogram does not resolve. "
            f"Pass {low:g} times a power of two.",
            code="GS101",
        )
    return exponent - base


def largest_scale(seen: Histogram, peak: float | None = None) -> float | None:
    """Return the largest scale without overflow; None if it is unknown.

    Among the powers of two times the scale of the histogram.

    >>> largest_scale(Histogram(1.0, 5, 0, -26, (60, 20, 20), 0, 0)) == 2.0**39
    True

    Args:
        seen: Its highest filled bin is moved to the last octave of float16, whose
            uppermost 1/2048 counts as finite.
        peak: The largest magnitude; makes the result exact.
    """
    if seen.nonfinite or not seen.nonzero:
        return None
    if peak is not None:
        shift = frexp(INFINITE_FROM)[1] - frexp(peak)[1]
        return seen.scale * 2.0 ** (shift - (peak * 2.0**shift >= INFINITE_FROM))
    filled = [index for index, count in enumerate(seen.bins) if count]
    if seen.above or not filled:
        return None
    return seen.scale * 2.0 ** (TOO_LARGE_FROM - 1 - seen.lowest - filled[-1])
