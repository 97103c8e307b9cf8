"""Which scale to take instead, in a line that a person reads."""

from gradscale.core.exponent_histogram import (
    TOLERATED,
    Histogram,
    fate,
    largest_scale,
    shift_between,
    smallest_scale,
)
from gradscale.core.flushed_zeros import hidden_zeros, tally_of
from gradscale.core.formatting import percent, power

# Octaves within which nothing is flushed any more, wherever the elements lay.
_FURTHEST = 12


def advice(seen: Histogram, tolerated: float = TOLERATED) -> str:
    """Say whether another scale would lose less, in a line.

    >>> from gradscale.core.exponent_histogram import Histogram
    >>> advice(Histogram(1.0, 0, 3, -37, (11, *[37] * 10, 29, 590), 0, 0))
    'raise S to 2^12: lost elements 41 % -> 0.3 %'
    """
    return _verdict(seen, tolerated) + _about_zeros(seen, tolerated)


def _verdict(seen: Histogram, tolerated: float) -> str:
    now, here = fate(seen), power(seen.scale)
    if seen.nonfinite:
        share = percent(seen.nonfinite / seen.total)
        return (
            f"lower S from {here}: {share} of the elements are not finite, and how "
            "far they are off cannot be told"
        )
    if not seen.nonzero:
        return f"S={here}: every element is 0, which tells nothing"
    low, high = smallest_scale(seen, tolerated), largest_scale(seen)
    if low is None or (high is not None and low > high):
        limit = seen.scale if high is None else high
        at_limit = fate(seen, shift_between(seen.scale, limit))
        return (
            f"no scale fits: {power(limit)}, the largest that does not overflow, loses "
            f"{percent(at_limit.lost)} of the elements; keep the layers with the "
            "largest gradients in float32, or train in bfloat16"
        )
    if now.overflowed and high is not None:
        moved = fate(seen, shift_between(seen.scale, high))
        return (
            f"lower S to {power(high)}: overflowing elements "
            f"{percent(now.overflow)} -> {percent(moved.overflow)}"
        )
    if now.lost > tolerated:
        moved = fate(seen, shift_between(seen.scale, low))
        return (
            f"raise S to {power(low)}: lost elements {percent(now.lost)} -> "
            f"{percent(moved.lost)}"
        )
    hidden = _hidden_share(seen, 0)
    if hidden > tolerated:
        room = _FURTHEST if high is None else shift_between(seen.scale, high)
        octaves = 0
        while octaves < room and _hidden_share(seen, octaves) > tolerated:
            octaves += 1
        return (
            f"raise S to {power(seen.scale * 2.0**octaves)}: by the smallest that are "
            f"left, backward flushed about {percent(hidden)} of the elements, and "
            f"{percent(_hidden_share(seen, octaves))} there"
        )
    most = "" if high is None else f"; up to {power(high)} nothing overflows"
    return f"keep S={here}: lost elements {percent(now.lost)}{most}"


def _hidden_share(seen: Histogram, shift: int) -> float:
    """Return the share of elements that backward has probably flushed to 0."""
    [now] = hidden_zeros([tally_of(seen)])
    [there] = hidden_zeros([tally_of(seen)], shift)
    return there / max(seen.nonzero + now, 1)


def _about_zeros(seen: Histogram, tolerated: float) -> str:
    if not seen.nonzero or seen.zeros <= tolerated * seen.total:
        return ""
    return (
        f". {percent(seen.zeros / seen.total)} of all elements are 0; those that "
        "backward flushed look like true zeros, and only a second scale tells them "
        "apart"
    )
