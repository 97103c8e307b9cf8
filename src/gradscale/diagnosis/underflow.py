"""What the scale loses at the small end, and what another would lose."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gradscale.runfile import BINS, LOWEST_EXPONENT, SampleRow, TensorSample

# float16 has ten exponents of subnormals below its normal ones.
SUBNORMAL_BINS = 10
# Bits free above the largest gradient: batches differ.
SPARE_BITS = 2
# Other scales that the table shows, in bits from the present one.
SHIFTS = (-8, -4, 4, 8)


class Sum(NamedTuple):
    """Counts of one tensor, or of several together, at one step."""

    total: int
    zeros: int
    below: int
    above: int
    nonfinite: int
    histogram: tuple[int, ...]

    @property
    def subnormals(self) -> int:
        """Elements that float16 holds with fewer digits."""
        return sum(self.histogram[:SUBNORMAL_BINS])

    def lost(self, shift: int = 0) -> float:
        """Return the share of elements in (0, 2^-24) if the scale were 2^shift higher.

        Elements that are 0 are not counted: they may have been 0 before. Of those
        that are below 2^-24 now, it is not known how far: a higher scale is taken to
        lose all of them still, so that the truth is never worse.

        >>> Sum(8, 0, 2, 0, 0, (1, 1, *(0,) * 36, 4, 0)).lost(-1)
        0.375
        """
        gone = self.below + sum(self.histogram[: max(0, -shift)])
        return gone / self.total if self.total else 0.0

    def overflows(self, shift: int) -> bool:
        """Tell whether some element would leave float16 at a scale 2^shift higher."""
        top = BINS - max(0, shift)
        return bool(self.above or self.nonfinite or any(self.histogram[max(0, top) :]))

    @property
    def headroom(self) -> int:
        """Whole bits between the largest magnitude and 2^16; BINS if all is 0."""
        filled = [place for place, count in enumerate(self.histogram) if count]
        return 0 if self.above else BINS - 1 - filled[-1] if filled else BINS


def added(samples: Iterable[TensorSample]) -> Sum:
    """Return the counts of several tensors together."""
    total = zeros = below = above = nonfinite = 0
    bins = [0] * BINS
    for sample in samples:
        total += sample.total
        zeros += sample.zeros
        below += sample.below
        above += sample.above
        nonfinite += sample.nonfinite
        for place, count in enumerate(sample.histogram):
            if count:
                bins[place] += count
    return Sum(total, zeros, below, above, nonfinite, tuple(bins))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What one tensor loses. Shares of its elements, in [0, 1].

    Attributes:
        tensor: Its name; empty for all together.
        elements: How many it has.
        zeros: Exactly 0, for whatever reason.
        flushed: Of these, about as many as were not 0 at a higher scale; None if no
            higher scale was sampled.
        lost: Above 0 and below 2^-24, which float16 cannot hold.
        subnormals: Held with fewer digits.
        at: The share that would be lost at another scale, by its distance in bits;
            None where it would overflow.
    """

    tensor: str
    elements: int
    zeros: float
    flushed: float | None
    lost: float
    subnormals: float
    at: Mapping[int, float | None]


@dataclass(frozen=True, kw_only=True)
class Underflow:
    """What the present scale loses, and what another would.

    Attributes:
        step: The last step that was sampled.
        scale: Its scale.
        samples: How many steps were sampled.
        whole: All tensors together.
        tensors: Each tensor, the one that loses most first.
        histogram: Counts of all tensors together; bin i has magnitudes of scaled
            gradients in [2^(i - 24), 2^(i - 23)).
        zeros: Elements that are exactly 0.
        below: Elements in (0, 2^-24).
        above: Finite elements of 2^16 and more.
        raise_bits: By how many bits the scale could be raised; 0 if by none.
    """

    step: int
    scale: float
    samples: int
    whole: Loss
    tensors: tuple[Loss, ...]
    histogram: tuple[int, ...]
    zeros: int
    below: int
    above: int
    raise_bits: int

    def as_dict(self) -> dict[str, Any]:
        """Return the table as JSON has it."""
        return {**asdict(self), "lowest_exponent": LOWEST_EXPONENT}


@dataclass
class Meter:
    """Reads samples in the order of steps and keeps what the table needs.

    Attributes:
        scales: The scale of each sampled step.
    """

    scales: Mapping[int, float]
    _steps: int = 0
    _step: int = 0
    _now: dict[str, TensorSample] = field(default_factory=dict)
    # The smallest share of zeros of each tensor, for each scale it was sampled at.
    _zeros: dict[str, dict[float, float]] = field(default_factory=dict)

    def see(self, step: int, rows: Sequence[SampleRow]) -> float | None:
        """Take in the samples of one step; return the share of all that is lost."""
        scale = self.scales.get(step)
        whole = added(row.sample for row in rows)
        if scale is None or not whole.total:
            return None
        for row in rows:
            share = row.sample.zeros / row.sample.total if row.sample.total else 0.0
            kept = self._zeros.setdefault(row.tensor, {})
            kept[scale] = min(share, kept.get(scale, 1.0))
        if not whole.nonfinite:
            self._step, self._now = step, {row.tensor: row.sample for row in rows}
        self._steps += 1
        return whole.lost()

    def table(self) -> Underflow | None:
        """Return the table; None if no finite step was sampled."""
        if not self._now:
            return None
        whole = added(self._now.values())
        parts = [self._loss(name, added([s])) for name, s in self._now.items()]
        parts.sort(key=lambda each: (-each.lost, -(each.flushed or 0), -each.subnormals))
        flushed = [(p.flushed, p.elements) for p in parts if p.flushed is not None]
        known = sum(elements for _, elements in flushed)
        share = sum(part * elements for part, elements in flushed) / known if known else 0
        total = self._loss("", whole, share if known else None)
        return Underflow(
            step=self._step,
            scale=self.scales[self._step],
            samples=self._steps,
            whole=total,
            tensors=tuple(parts),
            histogram=whole.histogram,
            zeros=whole.zeros,
            below=whole.below,
            above=whole.above,
            raise_bits=max(0, min(whole.headroom, BINS) - SPARE_BITS),
        )

    def _loss(self, name: str, counts: Sum, flushed: float | None = None) -> Loss:
        total = counts.total or 1
        zeros = counts.zeros / total
        if name:
            scale = self.scales[self._step]
            higher = [z for at, z in self._zeros[name].items() if at > scale]
            flushed = max(0.0, zeros - min(higher)) if higher else None
        at = {
            shift: None if counts.overflows(shift) else counts.lost(shift)
            for shift in SHIFTS
        }
        return Loss(
            tensor=name,
            elements=counts.total,
            zeros=zeros,
            flushed=flushed,
            lost=counts.lost(),
            subnormals=counts.subnormals / total,
            at=at,
        )
