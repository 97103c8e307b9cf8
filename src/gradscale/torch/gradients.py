"""The gradients of an optimizer, and what one read of them shows."""

import ctypes
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.devices import moved

# Many small reads cost more than one copy: 4000 x 1024 in
# benchmarks/results/step_cpu.json.
SMALL = 16384
# Partial sums of this many squares keep 6 digits in f32, and the piece stays in the
# cache: half the time of two reads, benchmarks/results/step_cpu.json.
CHUNK = 2**20


class Gradients(NamedTuple):
    """The gradients of some parameters, dense and real, each memory once.

    Attributes:
        params: The parameter behind each entry of `tensors`.
        tensors: float[...] each; views where the gradient is complex, sparse or a
            DTensor, so that writing into them changes the gradient.
        marks: (address, version) of each: equal marks mean untouched values.
        present: How many parameters have a gradient, empty and shared ones included.
        shared: Two parameters have one and the same gradient.
        sharded: Some parameter is a DTensor.
    """

    params: list[Tensor]
    tensors: list[Tensor]
    marks: list[tuple[int, int]]
    present: int
    shared: bool
    sharded: bool


class Reading(NamedTuple):
    """What one read of the gradients showed. On the device; making it never syncs.

    Attributes:
        marks: The marks of the gradients that were read.
        params: Their parameters.
        groups: For each dtype and device, (dtype, peak): peak is f32[] or f64[] on
            the home device, the largest magnitude, NaN if there is one.
        peaks: (positions, peaks) for each group: float[n] on the group's device, one
            for each parameter; None where the group is known to be harmless.
        devices: Where the gradients are.
        norm: f32[] or f64[] on the home device, the norm of the gradients as they
            are; None if it was not asked for.
    """

    marks: list[tuple[int, int]]
    params: list[Tensor]
    groups: list[tuple[torch.dtype, Tensor]]
    peaks: list[tuple[list[int], Tensor | None]]
    devices: list[torch.device]
    norm: Tensor | None

    def found(self, multiplier: Tensor) -> Tensor:
        """Return 1 if a gradient is not finite, or would not be once multiplied.

        Rounding is monotonic, so the largest magnitude answers for all of them.

        Args:
            multiplier: f32[], on the home device.

        Returns:
            f32[], exactly 0 or 1.
        """
        # 0 * x is 0 for what is finite and NaN for all else.
        flags = [
            torch.nan_to_num(0.0 * (peak * multiplier).to(dtype), nan=1.0).float()
            for dtype, peak in self.groups
        ]
        return largest(flags)

    def amax(self) -> Tensor:
        """Return the largest magnitude as f32[]."""
        return largest([peak.float() for _, peak in self.groups])

    def culprits(self, multiplier: Tensor) -> list[Tensor]:
        """Return the parameters behind `found(multiplier)`. Syncs."""
        places: list[int] = []
        for (dtype, _), (positions, peaks) in zip(self.groups, self.peaks, strict=True):
            if peaks is not None:
                here = peaks * multiplier.to(peaks.device)
                finite = torch.isfinite(here.to(dtype)).tolist()
                places += [i for i, ok in zip(positions, finite, strict=True) if not ok]
        return [self.params[i] for i in sorted(places)]


@torch.no_grad()
def read(
    gradients: Gradients, home: torch.device, norm_type: float | None = None
) -> Reading:
    """Read the gradients once; write nothing.

    No host sync: gradients on the CPU are looked at where they lie, all others are
    reduced on their device.

    Args:
        gradients: At least one tensor.
        home: Where the facts go.
        norm_type: Also take the norm of this order, summed wide enough not to
            overflow where the norm does not.
    """
    groups, peaks, norms, devices = [], [], [], []
    for (device, dtype), positions, tensors in by_kind(gradients.tensors):
        on_host = device.type == "cpu" and not torch.compiler.is_compiling()
        read_group = _read_on_host if on_host else _read_on_device
        peak, each, norm = read_group(tensors, norm_type)
        groups.append((dtype, moved(peak, home)))
        peaks.append((positions, each))
        devices.append(device)
        if norm is not None:
            norms.append(moved(norm, home))
    total = None
    if norm_type is not None:
        total = combine_norms(norms, norm_type)
    return Reading(gradients.marks, gradients.params, groups, peaks, devices, total)


def by_kind(
    tensors: Sequence[Tensor],
) -> list[tuple[tuple[torch.device, torch.dtype], list[int], list[Tensor]]]:
    """Return the tensors of each device and dtype, with their positions."""
    if not tensors:
        return []
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


def _read_on_device(
    tensors: list[Tensor], norm_type: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    wide = _at_least_f32(tensors[0].dtype)
    each = torch.stack(torch._foreach_norm(tensors, math.inf, dtype=wide))
    peak = each.amax()
    if norm_type is None:
        return peak, each, None
    if norm_type == math.inf:
        return peak, each, peak
    # MPS and some XPU devices have no f64.
    if tensors[0].device.type in ("cuda", "cpu"):
        wide = torch.float64
    norms = torch._foreach_norm(tensors, norm_type, dtype=wide)
    return peak, each, torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _read_on_host(
    tensors: list[Tensor], norm_type: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dtype = tensors[0].dtype
    add_squares = norm_type == 2.0 and dtype in (torch.float32, torch.float64)
    pieces = _pieces(tensors)
    extremes: list[Tensor] = []
    squares: list[Tensor] = []
    for piece in pieces:
        extremes += torch.aminmax(piece)
        if add_squares:
            # Right after, while the piece is in the cache: one read of the memory.
            squares.append(torch.dot(piece, piece))
    peak = torch.stack(extremes).abs().amax().to(_at_least_f32(dtype))
    highest = _value(peak)
    # Only a peak beyond this can be a culprit, now or when it is unscaled.
    harmless = torch.finfo(dtype).max * 2.0**-32
    each = None if highest <= harmless else _peaks_on_host(tensors)
    if norm_type is None:
        return peak, each, None
    if norm_type == math.inf or not 0.0 < highest < math.inf:
        return peak, each, peak
    return peak, each, _norm_on_host(pieces, squares, norm_type)


def _pieces(tensors: list[Tensor]) -> list[Tensor]:
    """Return the elements of all tensors as vectors of at most `CHUNK`."""
    small = [tensor for tensor in tensors if tensor.numel() < SMALL]
    flat = [t.reshape(-1) for t in tensors if t.numel() >= SMALL]
    if small:
        flat.append(torch._utils._flatten_dense_tensors(small))
    return [piece for vector in flat for piece in vector.split(CHUNK)]


def _peaks_on_host(tensors: list[Tensor]) -> Tensor:
    extremes = [torch.stack(torch.aminmax(t)).abs().amax() for t in tensors]
    return torch.stack(extremes).to(_at_least_f32(tensors[0].dtype))


def _norm_on_host(
    pieces: list[Tensor], squares: list[Tensor], norm_type: float
) -> Tensor:
    if squares:
        norm = torch.stack(squares).double().sum().sqrt()
        # An overflow is inf; squares that all underflow would look like a norm of 0.
        if 1e-15 < _value(norm) < math.inf:
            return norm
    norms = [
        torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64)
        for piece in pieces
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _value(scalar: Tensor) -> float:
    # A load from host memory: no operator runs and nothing is waited for.
    kind = ctypes.c_double if scalar.dtype is torch.float64 else ctypes.c_float
    return kind.from_address(scalar.data_ptr()).value


def _at_least_f32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
