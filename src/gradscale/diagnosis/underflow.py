"""What the scale loses at the small end, and what another would lose."""

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
from gradscale.core.flushed_zeros import Tally, hidden_zeros, lost_share, tally_of
from gradscale.core.formatting import percent, power
from gradscale.judge.build import SPARE_BITS
from gradscale.runfile import LOWEST_EXPONENT, SampleRow

# Other scales that the table shows, in bits from the present one.
SHIFTS = (-8, -4, 4, 8)
# How the gradient of a module's output is named: not a parameter's.
_ACTIVATION = " (output)"


def lost_at(seen: Histogram, shift: int) -> float | None:
    """Return the share that a scale 2^shift times as high loses; None if it overflows.

    How far below 2^-24 the smallest elements are, a run file does not say. For a
    higher scale their number is taken to fall by the same factor from bin to bin, such
    that it goes on where the first bin ends. Histograms fall faster than that, so this
    errs upwards.

    >>> seen = Histogram(1.0, 0, 4, -24, (4, 1, *(0,) * 36, 7, 0), 0, 0)
    >>> lost_at(seen, 0), lost_at(seen, -2), lost_at(seen, 1), lost_at(seen, 2)
    (0.25, 0.5, 0.125, None)
    """
    told = fate(seen, shift)
    if told.overflowed or seen.nonfinite:
        return None
    if shift <= 0 or not seen.deep:
        return told.lost
    falls = seen.deep / (seen.deep + seen.between(LOWEST_EXPONENT, LOWEST_EXPONENT + 1))
    return told.lost * falls**shift


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What one tensor loses. Zeros that backward has flushed are estimated.

    Attributes:
        tensor: Its name; empty for all together.
        elements: How many it has.
        zeros: The share of them that is exactly 0, for whatever reason.
        flushed: The share of them that is 0 and probably was flushed in backward.
        lost: The share that is too small for float16, of those that are not truly 0:
            what is below 2^-24, and what was flushed.
        subnormal: The share of those that are not 0 that has fewer digits.
        at: What would be lost at another scale, by its distance in bits; None where
            something would overflow. Missing where nobody can tell: what becomes of
            a gradient of zeros at a higher scale.
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
        """All of its elements are 0."""
        return self.zeros == 1.0


@dataclass(frozen=True, kw_only=True)
class Underflow:
    """What the present scale loses, and what another would.

    Attributes:
        step: The last step that was sampled and finite.
        samples: How many steps were sampled.
        seen: The gradients of that step, all together; the scale is in it.
        whole: What all tensors together lose.
        tensors: What each tensor loses: those of zeros alone first, then the one
            that loses most.
        advice: Whether another scale would lose less, in a line.
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
        """Return the table as JSON has it."""
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
    """Reads samples in the order of steps and keeps what the table needs."""

    _samples: int = 0
    _step: int = 0
    _parts: dict[str, Histogram] = field(default_factory=dict)

    def see(self, step: int, scale: float, rows: Sequence[SampleRow]) -> float | None:
        """Take in the samples of one step; return the share of all that is lost."""
        parts = {
            row.tensor: histogram_of(row.sample, scale)
            for row in rows
            if not row.tensor.endswith(_ACTIVATION)
        }
        if not parts:
            return None
        whole = pooled(parts.values())
        self._samples += 1
        if not whole.nonfinite:
            self._step, self._parts = step, parts
        return lost_share(map(tally_of, parts.values()))

    def table(self) -> Underflow | None:
        """Return the table; None if no finite step was sampled."""
        if not self._parts:
            return None
        parts = list(self._parts.values())
        whole = pooled(parts)
        tallies = [tally_of(part) for part in parts]
        # Of each tensor, at the present scale and at the higher ones.
        hidden = {
            shift: hidden_zeros(tallies, shift) for shift in (0, *SHIFTS) if shift >= 0
        }
        tensors = [
            _lost(name, part, {shift: each[place] for shift, each in hidden.items()})
            for place, (name, part) in enumerate(self._parts.items())
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
        name: Of the tensor.
        seen: What it looks like.
        hidden: How many of its zeros were flushed, at the present scale and higher.
        unknown: Some part of it is nothing but zeros that were flushed.
    """
    flushed, total = hidden[0], max(seen.total, 1)
    # Truly 0 are the others.
    every = max(seen.nonzero + flushed, 1)
    unknown = unknown or (flushed > 0 and not seen.nonzero)
    at: dict[int, float | None] = {}
    for shift in SHIFTS:
        if shift > 0 and unknown:
            continue
        share = lost_at(seen, shift)
        still = hidden.get(shift, flushed)
        at[shift] = None if share is None else (share * seen.nonzero + still) / every
    told = fate(seen)
    return Lost(
        tensor=name,
        elements=seen.total,
        zeros=seen.zeros / total,
        flushed=flushed / total,
        lost=(told.flushed + flushed) / every,
        subnormal=told.coarse,
        at=at,
    )


def _advice(seen: Histogram, tallies: Sequence[Tally], *, unknown: bool) -> str:
    """Return the line of advice: as much scale as fits, if some is lost.

    That is what GS209 advises too: how far below float16 the smallest elements are, a
    run file does not say, so that no smaller scale is known to be enough.
    """
    here, now = power(seen.scale), lost_share(tallies)
    highest = largest_scale(seen)
    if highest is None:
        return f"S = {here}: every element is 0, which tells nothing"
    bits = shift_between(seen.scale, highest) - SPARE_BITS
    if now <= TOLERATED:
        little = f"about {percent(now)} of the elements" if now else "no element"
        return f"S = {here} loses {little}, and up to {power(highest)} none overflows"
    lost = f"about {percent(now)} of the elements are lost at S = {here}"
    if bits < SPARE_BITS:
        return (
            f"{lost}, and a higher scale would overflow: keep the layers with the "
            "largest gradients in float32, or train in bfloat16"
        )
    raised = f"{lost}: raise it to {power(seen.scale * 2.0**bits)}"
    if unknown:
        return f"{raised}; what appears there of the tensors of zeros shows only then"
    hidden = sum(hidden_zeros(tallies, bits))
    every = seen.nonzero + sum(hidden_zeros(tallies))
    there = ((lost_at(seen, bits) or 0.0) * seen.nonzero + hidden) / max(every, 1)
    return f"{raised}, where it would be about {percent(there)}"
