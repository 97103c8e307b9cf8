"""One sample of the underflow meter, on its way to the host and there."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradscale.core.exponent_histogram import NORMAL_FROM, Fate, Histogram, fate
from gradscale.core.flushed_zeros import Tally, lost_share
from gradscale.runfile.rows import BINS, LOWEST_EXPONENT, TensorSample
from gradscale.torch.device_state.late import Late
from gradscale.torch.devices import host_value
from gradscale.torch.kernels.reference import (
    ABOVE,
    BELOW,
    FIRST,
    LOWEST,
    NONFINITE,
    ZEROS,
)

Entry = TypeVar("Entry")
# What the name of a module carries where its activation gradients are meant.
OUTPUT = " (output)"


class Made(Mapping[str, Entry]):
    """A mapping that is made when somebody looks into it: the run file's thread, say.

    Args:
        make: Returns it.
    """

    def __init__(self, make: Callable[[], Mapping[str, Entry]]) -> None:
        self._make = make

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        return self._make()

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class UnderflowSample(NamedTuple):
    """What the meter counted in one step, on the host.

    Attributes:
        step: Which update this was, counted from 1.
        scale: The scale that is in the gradients.
        total: The histogram of all gradients together; not of activations.
        tensors: The histogram of each gradient, by the name of its parameter.
        activations: The histogram of the gradient of each module's output, by the
            name of the module; empty unless they are watched.
        peaks: The largest magnitude of each gradient, where it is known.
        counts: i64[n, SLOTS], those of each gradient.
    """

    step: int
    scale: float
    total: Histogram
    tensors: Mapping[str, Histogram]
    activations: Mapping[str, Histogram]
    peaks: Mapping[str, float]
    counts: Tensor

    @property
    def whole(self) -> Fate:
        """What becomes of all gradients together at this scale; not of activations."""
        return fate(self.total)

    @property
    def lost(self) -> float:
        """The share of gradient elements too small for float16 at this scale.

        An estimate: zeros that backward seems to have flushed are among them.
        """
        return lost_share(tallies_of(self.counts))

    def rows(self) -> Mapping[str, TensorSample]:
        """Return what a run file keeps: `RunWriter.samples(sample.step, rows)`."""
        return Made(self._rows)

    def _rows(self) -> dict[str, TensorSample]:
        rows = {name: row_of(seen) for name, seen in self.tensors.items()}
        for name, seen in self.activations.items():
            rows[name + OUTPUT] = row_of(seen)
        return rows


def row_of(seen: Histogram) -> TensorSample:
    """Return a histogram with the bins of a run file: those that f16 has."""
    lower = seen.between(seen.lowest, LOWEST_EXPONENT)
    first = LOWEST_EXPONENT - seen.lowest
    bins = tuple(seen.bins[first : first + BINS])
    return TensorSample(
        total=seen.total,
        zeros=seen.zeros,
        subnormals=sum(bins[:10]),
        histogram=bins,
        below=seen.deep + lower,
        above=seen.above,
        nonfinite=seen.nonfinite,
    )


def tallies_of(counts: Tensor) -> list[Tally]:
    """Return what each gradient looks like; the same as its row in a run file tells.

    Args:
        counts: i64[n, SLOTS], on the host.
    """
    # Whole numbers, so that sums are exact in any order. What lies above the bins
    # stands right behind them.
    kept = counts[:, FIRST + LOWEST_EXPONENT - LOWEST : NONFINITE]
    columns = (
        counts[:, ZEROS],
        counts[:, BELOW : FIRST + LOWEST_EXPONENT - LOWEST].sum(1),
        kept[:, 0],
        kept.sum(1),
        (kept * torch.arange(kept.shape[1], device=kept.device)).sum(1),
        kept[:, NORMAL_FROM - LOWEST_EXPONENT :].sum(1),
    )
    return [Tally(*row) for row in torch.stack(columns, 1).tolist()]


Parts = list[tuple[list[str], Late]]


@dataclass
class Taken:
    """A sample on its way to the host.

    Attributes:
        scale: f32[1].
        step: Which update it is of, once that is known.
        tensors, activations: Names, and i64[n, SLOTS] of as many tensors.
        peaks: Names, and float[n] of as many tensors.
        names: Those that are taken: two models may use the same.
    """

    scale: Late
    step: int = 0
    tensors: Parts = field(default_factory=list)
    activations: Parts = field(default_factory=list)
    peaks: Parts = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def read(self) -> UnderflowSample:
        """Return the sample. Waits if it has not arrived yet."""
        scale = host_value(self.scale.values())
        tensors, activations, peaks = (
            [(names, late.values()) for names, late in parts]
            for parts in (self.tensors, self.activations, self.peaks)
        )
        counts = torch.cat([rows for _, rows in tensors])
        return UnderflowSample(
            self.step,
            scale,
            _histogram(counts.sum(0).tolist(), scale),
            Made(partial(_histograms, tensors, scale)),
            Made(partial(_histograms, activations, scale)),
            Made(partial(_by_name, peaks)),
            counts,
        )


def _by_name(parts: list[tuple[list[str], Tensor]]) -> dict[str, Any]:
    return {
        name: value
        for names, values in parts
        for name, value in zip(names, values.tolist(), strict=True)
    }


def _histograms(
    parts: list[tuple[list[str], Tensor]], scale: float
) -> dict[str, Histogram]:
    return {name: _histogram(row, scale) for name, row in _by_name(parts).items()}


def _histogram(row: list[int], scale: float) -> Histogram:
    return Histogram(
        scale,
        row[ZEROS],
        row[BELOW],
        LOWEST,
        tuple(row[FIRST:ABOVE]),
        row[ABOVE],
        row[NONFINITE],
    )
