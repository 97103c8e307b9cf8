"""What the scale loses at the small end, and what another would lose."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradscale.core.findings import power
from gradscale.core.flushed import Flushed, closest_pair, estimate_flushed
from gradscale.core.scale_advice import advice, percent
from gradscale.core.underflow import (
    TOLERATED,
    Histogram,
    fate,
    histogram_of,
    largest_scale,
    pooled,
    shift_between,
)
from gradscale.runfile import LOWEST_EXPONENT, SampleRow

# Other scales that the table shows, in bits from the present one.
SHIFTS = (-8, -4, 4, 8)
# Bits that stay free above the largest gradient: batches differ.
SPARE_BITS = 2
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
    """What one tensor loses.

    Attributes:
        tensor: Its name; empty for all together.
        elements: How many it has.
        zeros: The share of them that is exactly 0, for whatever reason.
        lost: The share of the others that is too small for float16.
        subnormal: The share of the others that has fewer digits.
        at: What would be lost at another scale, by its distance in bits; None where
            something would overflow.
    """

    tensor: str
    elements: int
    zeros: float
    lost: float
    subnormal: float
    at: Mapping[int, float | None]


@dataclass(frozen=True, kw_only=True)
class Underflow:
    """What the present scale loses, and what another would.

    Attributes:
        step: The last step that was sampled and finite.
        samples: How many steps were sampled.
        seen: The gradients of that step, all together; the scale is in it.
        whole: What all tensors together lose.
        tensors: What each tensor loses, the one that loses most first.
        advice: Whether another scale would lose less, in a line.
        flushed: What backward flushed to 0, told from two scales; None if there was
            but one.
    """

    step: int
    samples: int
    seen: Histogram
    whole: Lost
    tensors: tuple[Lost, ...]
    advice: str
    flushed: Flushed | None

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
            "flushed": self.flushed._asdict() if self.flushed else None,
            "histogram": self.seen._asdict(),
            "whole": asdict(self.whole),
            "tensors": [asdict(lost) for lost in self.tensors],
        }


@dataclass
class Meter:
    """Reads samples in the order of steps and keeps what the table needs."""

    _seen: list[Histogram] = field(default_factory=list)
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
        self._seen.append(whole)
        if not whole.nonfinite:
            self._step, self._parts = step, parts
        return fate(whole).lost

    def table(self) -> Underflow | None:
        """Return the table; None if no finite step was sampled."""
        if not self._parts:
            return None
        whole = pooled(self._parts.values())
        tensors = [_lost(name, seen) for name, seen in self._parts.items()]
        tensors.sort(key=lambda each: (-each.lost, -each.subnormal))
        pair = closest_pair(self._seen)
        return Underflow(
            step=self._step,
            samples=len(self._seen),
            seen=whole,
            whole=_lost("", whole),
            tensors=tuple(tensors),
            advice=_advice(whole),
            flushed=estimate_flushed(*pair) if pair else None,
        )


def _lost(name: str, seen: Histogram) -> Lost:
    told = fate(seen)
    return Lost(
        tensor=name,
        elements=seen.total,
        zeros=seen.zeros / max(seen.total, 1),
        lost=told.lost,
        subnormal=told.coarse,
        at={shift: lost_at(seen, shift) for shift in SHIFTS},
    )


def _advice(seen: Histogram) -> str:
    """Return the line of advice; for elements below the bins, by extrapolation."""
    now, highest = fate(seen).lost, largest_scale(seen)
    if not seen.deep or now <= TOLERATED or highest is None:
        return advice(seen)
    bits = shift_between(seen.scale, highest) - SPARE_BITS
    if bits <= 0:
        return advice(seen)
    shares = [(shift, lost_at(seen, shift) or 0.0) for shift in range(bits + 1)]
    enough = (pair for pair in shares if pair[1] <= TOLERATED)
    shift, lost = next(enough, shares[-1])
    return (
        f"raise S to {power(seen.scale * 2.0**shift)}: lost elements {percent(now)} -> "
        f"about {percent(lost)}"
    )
