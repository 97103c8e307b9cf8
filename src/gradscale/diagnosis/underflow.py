"""Elements lost to float16 underflow, at the scale of a run and at others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradscale.core.exponent_histogram import (
    TOLERATED,
    Histogram,
    fate,
    histogram_of,
    largest_scale,
    pooled,
    shift_between,
)
from gradscale.core.flushed_zeros import (
    Tally,
    hidden_zeros,
    lost_layer,
    lost_share,
    tally_of,
)
from gradscale.core.formatting import percent, power
from gradscale.judge.finding_builders import SPARE_BITS
from gradscale.runfile import LOWEST_EXPONENT, SampleRow

# Other scales of the table, in bits from the present one.
SHIFTS = (-8, -4, 4, 8)
# Suffix of the gradients of module outputs, which are not parameters.
_ACTIVATION = " (output)"


def lost_at(seen: Histogram, shift: int) -> float | None:
    """Return the share lost at 2^shift times the scale; None if elements overflow.

    A run file does not resolve elements below 2^-24. For a higher scale their number is
    extrapolated by a constant factor from bin to bin, that of the first bin. Histograms
    fall faster, so this is an upper bound.

    >>> seen = Histogram(1.0, 0, 4, -24, (4, 1, *(0,) * 36, 7, 0), 0, 0)
    >>> lost_at(seen, 0), lost_at(seen, -2), lost_at(seen, 1), lost_at(seen, 2)
    (0.25, 0.5, 0.125, None)
    """
    shares = fate(seen, shift)
    if shares.overflowed or seen.nonfinite:
        return None
    if shift <= 0 or not seen.deep:
        return shares.lost
    falls = seen.deep / (seen.deep + seen.between(LOWEST_EXPONENT, LOWEST_EXPONENT + 1))
    return shares.lost * falls**shift


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The losses of one tensor. Zeros flushed in backward are estimated.

    Attributes:
        tensor: Its name; empty for all tensors together.
        elements: The number of elements.
        zeros: The share of elements that are exactly 0, true or flushed.
        flushed: The share of elements that were probably flushed to 0 in backward.
        lost: The share too small for float16, among elements that are not true zeros:
            those below 2^-24 and those flushed.
        subnormal: The share of subnormal elements among those that are not 0.
        at: The share lost at another scale, by its distance in bits; None if elements
            would overflow. Absent if unknown, as for an all-zero gradient at a higher
            scale.
    """

    tensor: str
    elements: int
    zeros: float
    flushed: float
    lost: float
    subnormal: float
    at: Mapping[int, float | None]

    @property
    def empty(self) -> bool:
        """True if all elements are 0."""
        return self.zeros == 1.0


@dataclass(frozen=True, kw_only=True)
class Underflow:
    """The losses at the present scale and at others.

    Attributes:
        step: The last step that was sampled and finite.
        samples: The number of sampled steps.
        seen: The histogram of all gradients of that step.
        whole: The losses of all tensors together.
        tensors: The losses of each tensor: all-zero ones first, then by share lost.
        advice: One line: keep the scale, or raise it.
    """

    step: int
    samples: int
    seen: Histogram
    whole: Lost
    tensors: tuple[Lost, ...]
    advice: str

    @property
    def scale(self) -> float:
        """The scale of that step."""
        return self.seen.scale

    def as_dict(self) -> dict[str, Any]:
        """Return the table as a JSON object."""
        return {
            "step": self.step,
            "samples": self.samples,
            "scale": self.scale,
            "advice": self.advice,
            "histogram": self.seen._asdict(),
            "whole": asdict(self.whole),
            "tensors": [asdict(lost) for lost in self.tensors],
        }


@dataclass
class Meter:
    """Reads samples in the order of steps and builds the table."""

    _samples: int = 0
    _step: int = 0
    _parts: dict[str, Histogram] = field(default_factory=dict)

    def add(
        self, step: int, scale: float, rows: Sequence[SampleRow]
    ) -> tuple[float | None, str]:
        """Add the samples of one step; return the share lost, and the worst layer."""
        parts = {
            row.tensor: histogram_of(row.sample, scale)
            for row in rows
            if not row.tensor.endswith(_ACTIVATION)
        }
        # The scale may be that of any scaler; without one the bins have no unit.
        if not parts or not 0.0 < scale < math.inf:
            return None, ""
        whole = pooled(parts.values())
        self._samples += 1
        if not whole.nonfinite:
            self._step, self._parts = step, parts
        tallies = list(map(tally_of, parts.values()))
        return lost_share(tallies), lost_layer(list(parts), tallies)

    def table(self) -> Underflow | None:
        """Return the table; None if no finite step was sampled."""
        if not self._parts:
            return None
        parts = list(self._parts.values())
        whole = pooled(parts)
        tallies = [tally_of(part) for part in parts]
        # For each tensor, at the present scale and at higher ones.
        hidden = {
            shift: hidden_zeros(tallies, shift) for shift in (0, *SHIFTS) if shift >= 0
        }
        tensors = [
            _lost(name, part, {shift: each[index] for shift, each in hidden.items()})
            for index, (name, part) in enumerate(self._parts.items())
        ]
        tensors.sort(key=lambda each: (not each.empty, -each.lost, -each.subnormal))
        unknown = any(each.empty and each.flushed for each in tensors)
        sums = {shift: sum(each) for shift, each in hidden.items()}
        return Underflow(
            step=self._step,
            samples=self._samples,
            seen=whole,
            whole=_lost("", whole, sums, unknown=unknown),
            tensors=tuple(tensors),
            advice=_advice(whole, tallies, unknown=unknown),
        )


def _lost(
    name: str, seen: Histogram, hidden: Mapping[int, int], *, unknown: bool = False
) -> Lost:
    """Return the row of a tensor.

    Args:
        name: The name of the tensor.
        seen: Its histogram.
        hidden: The number of flushed zeros, at the present scale and higher ones.
        unknown: Some tensor consists only of flushed zeros.
    """
    flushed, total = hidden[0], max(seen.total, 1)
    # The other zeros are true zeros.
    every = max(seen.nonzero + flushed, 1)
    unknown = unknown or (flushed > 0 and not seen.nonzero)
    at: dict[int, float | None] = {}
    for shift in SHIFTS:
        if shift > 0 and unknown:
            continue
        share = lost_at(seen, shift)
        still = hidden.get(shift, flushed)
        at[shift] = None if share is None else (share * seen.nonzero + still) / every
    shares = fate(seen)
    return Lost(
        tensor=name,
        elements=seen.total,
        zeros=seen.zeros / total,
        flushed=flushed / total,
        lost=(shares.flushed + flushed) / every,
        subnormal=shares.coarse,
        at=at,
    )


def _advice(seen: Histogram, tallies: Sequence[Tally], *, unknown: bool) -> str:
    """Return the line of advice: the largest scale that fits, if elements are lost.

    This agrees with GS209. A run file does not resolve elements below 2^-24, so no
    smaller scale is known to be sufficient.
    """
    here, now = power(seen.scale), lost_share(tallies)
    highest = largest_scale(seen)
    if highest is None:
        return f"S = {here}: every element is 0, so no scale can be recommended"
    bits = shift_between(seen.scale, highest) - SPARE_BITS
    if now <= TOLERATED:
        little = f"about {percent(now)} of the elements" if now else "no element"
        return f"S = {here} loses {little}; none overflows up to {power(highest)}"
    lost = f"about {percent(now)} of the elements are lost at S = {here}"
    if bits < SPARE_BITS:
        return (
            f"{lost}, but a higher scale would overflow: keep the layers with the "
            "largest gradients in float32, or train in bfloat16"
        )
    raised = f"{lost}: raise it to {power(seen.scale * 2.0**bits)}"
    if unknown:
        return f"{raised}; the effect on the all-zero tensors is unknown"
    hidden = sum(hidden_zeros(tallies, bits))
    every = seen.nonzero + sum(hidden_zeros(tallies))
    there = ((lost_at(seen, bits) or 0.0) * seen.nonzero + hidden) / max(every, 1)
    return f"{raised}, where about {percent(there)} would be lost"
