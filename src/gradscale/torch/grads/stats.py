"""Statistics of the gradients of one step, from one read of them."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.devices import to_device
from gradscale.torch.grads.read_plain import read_on_device, read_on_host
from gradscale.torch.kernels.grad_reader import GradReader
from gradscale.torch.kernels.plain import Decision, TensorStats
from gradscale.torch.tensor_list import GradSnapshot, Kind, numbers


class RankStats(NamedTuple):
    """The statistics of all ranks together; the same on each of them.

    Attributes:
        groups: For each dtype f64[], the largest magnitude of its gradients.
        norm: f64[], the norm over all ranks.
        bad_loss: f32[], 1 if a loss was not finite on any rank, else 0.
        desynced: f32[], 1 if a rank is out of step, else 0.
    """

    groups: list[tuple[torch.dtype, Tensor]]
    norm: Tensor
    bad_loss: Tensor
    desynced: Tensor


@dataclass
class KindStats:
    """Statistics of the gradients of one dtype on one device.

    Attributes:
        dtype, device: Of the gradients.
        positions: The index of each among all gradients.
        peak: f32[] or f64[], the largest magnitude; None if a kernel has read them.
        peaks: float[n], that of each, NaN if it contains NaN; None where none of them
            can be a culprit, or if a kernel has read them.
        norm: f32[] or f64[], their norm; None if it was not computed, or if a kernel
            has read them.
        stats: The statistics of each, if a kernel has read them.
        copies: How many ranks hold the same elements of each.
    """

    dtype: torch.dtype
    device: torch.device
    positions: Sequence[int]
    peak: Tensor | None = None
    peaks: Tensor | None = None
    norm: Tensor | None = None
    stats: TensorStats | None = None
    copies: float = 1.0

    def largest(self) -> Tensor:
        """Return f32[] or f64[], the largest magnitude."""
        if self.stats is not None:
            return self.stats.peaks.amax()
        assert self.peak is not None
        return self.peak

    def norm_of(self, norm_type: float) -> Tensor:
        """Return this rank's share of the norm."""
        if norm_type == math.inf:
            return self.largest()
        norm = self.norm
        if self.stats is not None:
            norm = self.stats.squares.sum().sqrt()
        assert norm is not None
        # Each of the ranks that hold the same elements contributes its share.
        return norm if self.copies == 1.0 else norm / self.copies ** (1.0 / norm_type)


@dataclass
class GradStats:
    """The results of one read of the gradients, on the device. No host sync.

    Attributes:
        params: The parameters of the gradients that were read; their names once the
            optimizer was deleted.
        kinds: The statistics of each dtype and device.
        home: The device of the results.
        norm_type: The order of the requested norm, or None.
        decision: The decision of the kernel that read them; None if there are several
            kinds, or other ranks to agree with.
        agreed: The statistics of all ranks; None where each decides alone. All but
            `culprits` and `named_peaks` then refer to all ranks.
        unscaled: The read has also unscaled the gradients, in place. The statistics
            are those before.
    """

    params: Sequence[Tensor | str]
    kinds: list[KindStats]
    home: torch.device
    norm_type: float | None
    decision: Decision | None = None
    agreed: RankStats | None = None
    unscaled: bool = False
    _groups: list[tuple[torch.dtype, Tensor]] | None = None
    _norm: Tensor | None = None

    @property
    def groups(self) -> list[tuple[torch.dtype, Tensor]]:
        """For each kind its dtype and f32[] or f64[], its largest magnitude."""
        if self.agreed is not None:
            return self.agreed.groups
        # functools.cached_property has a lock, which torch.compile refuses.
        if self._groups is None:
            peaks = [(kind.dtype, kind.largest()) for kind in self.kinds]
            # A rank without gradients has none.
            if any(peak.device != self.home for _, peak in peaks):
                peaks = [(dtype, to_device(p, self.home)) for dtype, p in peaks]
            self._groups = peaks
        return self._groups

    @property
    def norm(self) -> Tensor | None:
        """f32[] or f64[], the norm of the gradients as read; None if not requested."""
        if self.agreed is not None:
            return self.agreed.norm
        if self._norm is None and self.norm_type is not None and self.kinds:
            order = self.norm_type
            norms = [kind.norm_of(order) for kind in self.kinds]
            if any(norm.device != self.home for norm in norms):
                norms = [to_device(norm, self.home) for norm in norms]
            self._norm = norms[0] if len(norms) == 1 else combine_norms(norms, order)
        return self._norm

    def with_norm(self, norm_type: float) -> "GradStats | None":
        """Return the statistics with this norm; None if that takes another read."""
        if self.norm_type == norm_type:
            return self
        if self.agreed is not None:
            if norm_type != math.inf:
                return None
            agreed = self.agreed._replace(norm=self.amax())
            return replace(self, norm_type=norm_type, agreed=agreed)
        if norm_type in (2.0, math.inf) and all(k.stats for k in self.kinds):
            return replace(self, norm_type=norm_type, _norm=None)
        return None

    def nonfinite(self, factor: Tensor, *, divide: bool = False) -> Tensor:
        """Return 1 if a gradient is not finite, or would not be once multiplied.

        Rounding is monotonic, so testing the largest magnitude suffices.

        Args:
            factor: f32[], on the home device.
            divide: Divide by the factor instead, which may differ in the last bit.

        Returns:
            f32[], exactly 0 or 1.
        """
        # 0 * x is 0 for finite x and NaN for all else.
        flags = [
            torch.nan_to_num(0.0 * used.to(dtype), nan=1.0).float()
            for dtype, peak in self.groups
            for used in [peak / factor if divide else peak * factor]
        ]
        if self.agreed is not None:
            flags.append(self.agreed.desynced)
        return flags[0] if len(flags) == 1 else largest(flags)

    def amax(self) -> Tensor:
        """Return the largest magnitude as f32[]."""
        peaks = [peak.float() for _, peak in self.groups]
        return peaks[0] if len(peaks) == 1 else largest(peaks)

    def culprits(self, multiplier: Tensor) -> list[Tensor | str]:
        """Return the parameters behind `nonfinite(multiplier)`. Syncs."""
        flags = [
            (place, flag)
            for kind, _, bad in self._bad(multiplier)
            for place, flag in zip(kind.positions, bad.tolist(), strict=True)
        ]
        return [self.params[place] for place, flag in sorted(flags) if flag]

    def named_peaks(
        self, multiplier: Tensor
    ) -> list[tuple[list[Tensor | str], Tensor]]:
        """Return parameters and float[2, n]. No sync.

        The largest magnitude of each gradient, and 1 for those behind
        `nonfinite(multiplier)`, else 0.
        """
        return [
            (
                [self.params[place] for place in kind.positions],
                torch.stack([peaks, bad.to(peaks.dtype)]),
            )
            for kind, peaks, bad in self._bad(multiplier)
        ]

    def _bad(self, multiplier: Tensor) -> list[tuple[KindStats, Tensor, Tensor]]:
        # The clip of non-finite gradients is NaN, and would mark all as culprits.
        multiplier = torch.where(torch.isfinite(multiplier), multiplier, 1.0)
        return [
            (kind, peaks, ~torch.isfinite((peaks * here).to(kind.dtype)))
            for kind in self.kinds
            for peaks in [kind.peaks if kind.stats is None else kind.stats.peaks]
            if peaks is not None
            for here in [to_device(multiplier, kind.device)]
        ]


def read(
    gradients: GradSnapshot,
    home: torch.device,
    norm_type: float | None = None,
    reader: GradReader | None = None,
    scale: Tensor | None = None,
    max_norm: float | None = None,
    *,
    unscale: bool = False,
) -> GradStats:
    """Read the gradients once.

    No host sync: gradients on the CPU are read where they are, all others are reduced
    on their device.

    Args:
        gradients: At least one tensor.
        home: The device of the results.
        norm_type: Also compute the norm of this order, in a dtype whose sum overflows
            only if the norm does.
        reader: Reads by kernels where it can; None for plain operations.
        scale: f32[], the scale of the gradients, for the decision of a kernel.
        max_norm: The 2-norm to clip to, likewise.
        unscale: A kernel may also multiply them by `1 / scale`, in the same pass; see
            `GradStats.unscaled`. Else nothing is written.
    """
    kinds = []
    decision = None
    groups: Sequence[tuple[Kind, Sequence[int], list[Tensor]]]
    if gradients.kind is None:
        groups = by_kind(gradients.tensors, gradients.copies)
    else:
        every = range(len(gradients.tensors))
        groups = [(gradients.kind, every, gradients.tensors)]
    begins = None if gradients.kind is None else gradients.addresses
    # Of several kinds, one may have no kernel; others may be copies of the gradients.
    unscale = unscale and gradients.kind is not None
    unscaled = False
    for place, (kind, positions, tensors) in enumerate(groups):
        if reader is not None and scale is not None and reader.reads(kind, norm_type):
            numels = gradients.numels
            if len(groups) > 1:
                numels = numbers([numels[i] for i in positions])
            stats, decision = reader.read(
                tensors,
                kind,
                begins,
                numels,
                scale,
                max_norm,
                place,
                unscale=unscale,
            )
            unscaled = unscale
            kind_stats = KindStats(kind[1], kind[0], positions, stats=stats)
        else:
            # A fake tensor has no value to read.
            readable = type(tensors[0]) is Tensor and kind[0].type == "cpu"
            with torch.no_grad():
                if readable and not torch.compiler.is_compiling():
                    plain = read_on_host(tensors, norm_type, scale)
                else:
                    plain = read_on_device(tensors, norm_type)
            kind_stats = KindStats(kind[1], kind[0], positions, *plain)
        if gradients.copies is not None:
            kind_stats.copies = gradients.copies[positions[0]]
        kinds.append(kind_stats)
    if len(kinds) > 1 or groups[0][0][0] != home:
        decision = None
    return GradStats(
        gradients.params, kinds, home, norm_type, decision, unscaled=unscaled
    )


def by_kind(
    tensors: Sequence[Tensor], copies: Sequence[float] | None = None
) -> list[tuple[Kind, list[int], list[Tensor]]]:
    """Return the tensors of each device and dtype, with their positions.

    Args:
        tensors: The tensors.
        copies: Also separate tensors held by different numbers of ranks.
    """
    grouped: dict[tuple[Kind, float], list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        count = 1.0 if copies is None else copies[i]
        grouped[(tensor.device, tensor.dtype), count].append(i)
    return [(k, at, [tensors[i] for i in at]) for (k, _), at in grouped.items()]


def largest(facts: Sequence[Tensor]) -> Tensor:
    """Return the maximum of scalars; NaN if any is NaN."""
    return facts[0] if len(facts) == 1 else torch.stack(list(facts)).amax()


def combine_norms(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the total norm from the norms of the parts, all scalars."""
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
