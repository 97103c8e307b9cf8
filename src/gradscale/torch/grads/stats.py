"""What one read of the gradients shows."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.devices import moved
from gradscale.torch.grads.read_plain import read_on_device, read_on_host
from gradscale.torch.kernels.facts import TensorFacts
from gradscale.torch.kernels.readers import Reader
from gradscale.torch.tensor_list import GradSnapshot, Kind


class Agreed(NamedTuple):
    """What the readings of all ranks amount to; the same on each of them.

    Attributes:
        groups: For each dtype f64[], the largest magnitude of its gradients.
        norm: f64[], the norm of the whole.
        bad_loss: f32[], 1 if a loss was not finite on any rank, else 0.
        astray: f32[], 1 if a rank has lost its place, else 0.
    """

    groups: list[tuple[torch.dtype, Tensor]]
    norm: Tensor
    bad_loss: Tensor
    astray: Tensor


@dataclass
class KindReading:
    """What was read of the gradients of one dtype on one device.

    Attributes:
        dtype, device: Theirs.
        copies: How many ranks hold the same elements of each.
        positions: The place of each among all gradients.
        peaks: Returns float[n], the largest magnitude of each, NaN if there is one;
            None where none of them can be a culprit, or if `facts` are there.
        peak: f32[] or f64[], the largest of all; None if `facts` are there.
        norm: f32[] or f64[], their norm; None if it was not asked for, or if `facts`
            are there.
        facts: What a kernel has read of each.
    """

    dtype: torch.dtype
    device: torch.device
    positions: Sequence[int]
    peaks: Callable[[], Tensor] | None = None
    peak: Tensor | None = None
    norm: Tensor | None = None
    facts: TensorFacts | None = None
    copies: float = 1.0

    def each(self) -> Tensor | None:
        """Return float[n], the largest magnitude of each, if one may be a culprit."""
        if self.facts is not None:
            return self.facts.peaks
        return None if self.peaks is None else self.peaks()


@dataclass
class Reading:
    """What one read of the gradients showed. On the device; making it never syncs.

    Attributes:
        params: The parameters of the gradients that were read.
        kinds: What was read of each dtype and device.
        home: Where the facts go.
        norm_type: The order of the norm that was asked for, or None.
        agreed: What all ranks together have read; None where each decides for itself.
            Whatever is not about single parameters then speaks of the whole.
    """

    params: list[Tensor]
    kinds: list[KindReading]
    home: torch.device
    norm_type: float | None
    agreed: Agreed | None = None
    _groups: list[tuple[torch.dtype, Tensor]] | None = None
    _norm: Tensor | None = None

    @property
    def devices(self) -> list[torch.device]:
        """Where the gradients are."""
        return [kind.device for kind in self.kinds]

    @property
    def groups(self) -> list[tuple[torch.dtype, Tensor]]:
        """For each kind its dtype and f32[] or f64[], its largest magnitude."""
        if self.agreed is not None:
            return self.agreed.groups
        # functools.cached_property has a lock, which torch.compile refuses.
        if self._groups is None:
            self._groups = [(k.dtype, moved(_peak(k), self.home)) for k in self.kinds]
        return self._groups

    @property
    def norm(self) -> Tensor | None:
        """f32[] or f64[], the norm of the gradients as they are, if asked for."""
        if self.agreed is not None:
            return self.agreed.norm
        if self._norm is None and self.norm_type is not None and self.kinds:
            order = self.norm_type
            norms = [moved(_norm(kind, order), self.home) for kind in self.kinds]
            self._norm = combine_norms(norms, order)
        return self._norm

    def with_norm(self, norm_type: float) -> "Reading | None":
        """Return the reading with this norm, if it can be told without another read."""
        if self.norm_type == norm_type:
            return self
        if self.agreed is not None:
            if norm_type != math.inf:
                return None
            agreed = self.agreed._replace(norm=self.amax())
            return replace(self, norm_type=norm_type, agreed=agreed)
        told = norm_type in (2.0, math.inf) and all(k.facts for k in self.kinds)
        return Reading(self.params, self.kinds, self.home, norm_type) if told else None

    def found(self, factor: Tensor, *, divide: bool = False) -> Tensor:
        """Return 1 if a gradient is not finite, or would not be once multiplied.

        Rounding is monotonic, so the largest magnitude answers for all of them.

        Args:
            factor: f32[], on the home device.
            divide: They will be divided by it, which may differ in the last bit.

        Returns:
            f32[], exactly 0 or 1.
        """
        # 0 * x is 0 for what is finite and NaN for all else.
        flags = [
            torch.nan_to_num(0.0 * used.to(dtype), nan=1.0).float()
            for dtype, peak in self.groups
            for used in [peak / factor if divide else peak * factor]
        ]
        if self.agreed is not None:
            flags.append(self.agreed.astray)
        return largest(flags)

    def amax(self) -> Tensor:
        """Return the largest magnitude as f32[]."""
        return largest([peak.float() for _, peak in self.groups])

    def lone_facts(self) -> TensorFacts | None:
        """Return what a kernel has read, if that is all there is to know."""
        if self.agreed is not None or len(self.kinds) != 1:
            return None
        return self.kinds[0].facts if self.kinds[0].device == self.home else None

    def culprits(self, multiplier: Tensor) -> list[Tensor]:
        """Return the parameters behind `found(multiplier)`. Syncs."""
        flags = [
            (place, flag)
            for kind, _, bad in self._bad(multiplier)
            for place, flag in zip(kind.positions, bad.tolist(), strict=True)
        ]
        return [self.params[place] for place, flag in sorted(flags) if flag]

    def facts(self, multiplier: Tensor) -> list[tuple[list[Tensor], Tensor]]:
        """Return parameters and float[2, n]. No sync.

        The largest magnitude of each gradient, and 1 for those behind
        `found(multiplier)`, else 0.
        """
        return [
            (
                [self.params[place] for place in kind.positions],
                torch.stack([peaks, bad.to(peaks.dtype)]),
            )
            for kind, peaks, bad in self._bad(multiplier)
        ]

    def _bad(self, multiplier: Tensor) -> list[tuple[KindReading, Tensor, Tensor]]:
        # A clip of what is not finite is no number, and would make all culprits.
        multiplier = torch.where(torch.isfinite(multiplier), multiplier, 1.0)
        return [
            (kind, peaks, ~torch.isfinite((peaks * here).to(kind.dtype)))
            for kind in self.kinds
            for peaks in [kind.each()]
            if peaks is not None
            for here in [moved(multiplier, kind.device)]
        ]


def _peak(kind: KindReading) -> Tensor:
    if kind.facts is not None:
        return kind.facts.peaks.amax()
    assert kind.peak is not None
    return kind.peak


def _norm(kind: KindReading, norm_type: float) -> Tensor:
    if norm_type == math.inf:
        return _peak(kind)
    norm = kind.norm
    if kind.facts is not None:
        norm = kind.facts.squares.sum().sqrt()
    assert norm is not None
    # Each of the ranks that hold the same elements contributes its share of them.
    return norm if kind.copies == 1.0 else norm / kind.copies ** (1.0 / norm_type)


def read(
    gradients: GradSnapshot,
    home: torch.device,
    norm_type: float | None = None,
    reader: Reader | None = None,
) -> Reading:
    """Read the gradients once; write nothing.

    No host sync: gradients on the CPU are looked at where they lie, all others are
    reduced on their device.

    Args:
        gradients: At least one tensor.
        home: Where the facts go.
        norm_type: Also take the norm of this order, summed wide enough not to
            overflow where the norm does not.
        reader: Reads by kernels what it can; None for plain operations.
    """
    kinds = []
    groups: Sequence[tuple[Kind, Sequence[int], Sequence[Tensor]]] = (
        by_kind(gradients.tensors, gradients.copies)
        if gradients.kind is None
        else [(gradients.kind, range(len(gradients.tensors)), gradients.tensors)]
    )
    begins = None if gradients.kind is None else gradients.addresses
    for place, ((device, dtype), positions, tensors) in enumerate(groups):
        facts = None
        if reader is not None:
            looked = begins, gradients.numels
            facts = reader.read(tensors, norm_type, (device, dtype), *looked, place)
        if facts is not None:
            kind = KindReading(dtype, device, positions, facts=facts)
        else:
            on_host = device.type == "cpu" and not torch.compiler.is_compiling()
            read_kind = read_on_host if on_host else read_on_device
            with torch.no_grad():
                peak, peaks, norm = read_kind(list(tensors), norm_type)
            kind = KindReading(dtype, device, positions, peaks, peak, norm)
        if gradients.copies is not None:
            kind.copies = gradients.copies[positions[0]]
        kinds.append(kind)
    return Reading(gradients.params, kinds, home, norm_type)


def by_kind(
    tensors: Sequence[Tensor], copies: Sequence[float] | None = None
) -> list[tuple[tuple[torch.device, torch.dtype], list[int], list[Tensor]]]:
    """Return the tensors of each device and dtype, with their positions.

    Args:
        tensors: The tensors.
        copies: Also part those that lie on different numbers of ranks.
    """
    if not tensors:
        return []
    if copies is not None and len(set(copies)) > 1:
        return [
            (kind, [own[i] for i in at], part)
            for count in dict.fromkeys(copies)
            for own in [[i for i, n in enumerate(copies) if n == count]]
            for kind, at, part in by_kind([tensors[i] for i in own])
        ]
    first = tensors[0]
    kind = first.device, first.dtype
    if {t.device for t in tensors} == {kind[0]} and {t.dtype for t in tensors} == {
        kind[1]
    }:
        return [(kind, list(range(len(tensors))), list(tensors))]
    grouped: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        grouped[tensor.device, tensor.dtype].append(i)
    return [(k, at, [tensors[i] for i in at]) for k, at in grouped.items()]


def largest(facts: Sequence[Tensor]) -> Tensor:
    """Return the maximum of scalars; NaN if there is one."""
    return facts[0] if len(facts) == 1 else torch.stack(list(facts)).amax()


def combine_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of a whole from the norms of its parts, all scalars."""
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
