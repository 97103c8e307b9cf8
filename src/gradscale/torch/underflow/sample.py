"""One sample of the underflow meter, pending and on the host."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradscale.core.exponent_histogram import NORMAL_FROM, Fate, Histogram, fate
from gradscale.core.flushed_zeros import Tally, lost_layer, lost_share
from gradscale.runfile.rows import BINS, LOWEST_EXPONENT, TensorSample
from gradscale.torch.device_state.async_copy import AsyncTensor
from gradscale.torch.kernels.plain import (
    ABOVE,
    BELOW,
    FIRST,
    LOWEST,
    NONFINITE,
    ZEROS,
)

Entry = TypeVar("Entry")
# Suffix of a module's name in the row of its output gradients.
OUTPUT = " (output)"


class LazyMapping(Mapping[str, Entry]):
    """A mapping that is built on first access, often by the run file's thread.

    Args:
        build: Returns its entries.
    """

    def __init__(self, build: Callable[[], Mapping[str, Entry]]) -> None:
        self._build = build

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        return self._build()

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class UnderflowSample(NamedTuple):
    """The exponent histograms of one step, on the host.

    Attributes:
        step: The number of the update, from 1.
        scale: The scale of the gradients.
        total: The histogram of all gradients together, without activations.
        tensors: The histogram of each gradient, by the name of its parameter.
        activations: The histogram of the gradient of each module's output, by the
            name of the module; empty unless they are watched.
        peaks: The largest magnitude of each gradient, where known.
        counts: i64[n, SLOTS], the raw counts of each gradient.
        names: The name of each gradient.
    """

    step: int
    scale: float
    total: Histogram
    tensors: Mapping[str, Histogram]
    activations: Mapping[str, Histogram]
    peaks: Mapping[str, float]
    counts: Tensor
    names: list[str]

    @property
    def whole(self) -> Fate:
        """The effect of float16 on all gradients at this scale, without activations."""
        return fate(self.total)

    def lost_and_layer(self) -> tuple[float, str]:
        """Return the share of elements too small for float16, and the worst layer.

        The share is an estimate: it includes zeros that backward appears to have
        flushed. The layer is empty if none has lost more than half of its elements.
        """
        tallies = tallies_of(self.counts)
        return lost_share(tallies), lost_layer(self.names, tallies)

    def rows(self) -> Mapping[str, TensorSample]:
        """Return the rows of a run file, for `RunWriter.samples(sample.step, rows)`."""
        return LazyMapping(self._rows)

    def _rows(self) -> dict[str, TensorSample]:
        rows = {name: row_of(each) for name, each in self.tensors.items()}
        for name, each in self.activations.items():
            rows[name + OUTPUT] = row_of(each)
        return rows


def row_of(histogram: Histogram) -> TensorSample:
    """Return a histogram with the bins of a run file: the exponents of float16."""
    lower = histogram.between(histogram.lowest, LOWEST_EXPONENT)
    first = LOWEST_EXPONENT - histogram.lowest
    bins = tuple(histogram.bins[first : first + BINS])
    return TensorSample(
        total=histogram.total,
        zeros=histogram.zeros,
        subnormals=sum(bins[:10]),
        histogram=bins,
        below=histogram.deep + lower,
        above=histogram.above,
        nonfinite=histogram.nonfinite,
    )


def tallies_of(counts: Tensor) -> list[Tally]:
    """Return the tally of each gradient; equals that of its row in a run file.

    Args:
        counts: i64[n, SLOTS], on the host.
    """
    # Integers, so that sums are exact in any order. The count above the bins follows
    # directly after them.
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


# Names of tensors, and a tensor with one row for each.
NamedRows = list[tuple[list[str], AsyncTensor]]


@dataclass
class PendingSample:
    """A sample that is being copied to the host.

    Attributes:
        scale: f32[1], the scale of the gradients.
        step: The number of the update, set at its end.
        tensors, activations: n names with i64[n, SLOTS].
        peaks: n names with float[n].
        names: All names in use: two models may have the same.
    """

    scale: AsyncTensor
    step: int = 0
    tensors: NamedRows = field(default_factory=list)
    activations: NamedRows = field(default_factory=list)
    peaks: NamedRows = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def read(self) -> UnderflowSample:
        """Return the sample. Waits if it has not arrived yet."""
        (scale,) = self.scale.values().tolist()
        tensors, activations, peaks = (
            [(names, late.values()) for names, late in parts]
            for parts in (self.tensors, self.activations, self.peaks)
        )
        counts = torch.cat([rows for _, rows in tensors])
        return UnderflowSample(
            self.step,
            scale,
            _histogram(counts.sum(0).tolist(), scale),
            LazyMapping(partial(_histograms, tensors, scale)),
            LazyMapping(partial(_histograms, activations, scale)),
            LazyMapping(partial(_by_name, peaks)),
            counts,
            [name for names, _ in tensors for name in names],
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
