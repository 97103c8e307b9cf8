"""One read of gradients of one kind in plain operations."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.devices import host_value

# Many small reads cost more than one copy: 4000 x 1024 in
# benchmarks/results/step_cpu.json.
SMALL = 16384
# So few small ones are read one by one.
FEW = 8
# Partial sums of this many squares keep 6 digits in f32, and the piece stays in the
# cache: half the time of two reads, benchmarks/results/step_cpu.json.
CHUNK = 2**20

Peaks = Callable[[], Tensor]


class _Split(NamedTuple):
    """Which of some tensors are read through a copy.

    Attributes:
        is_small: For each tensor, whether it is.
        small, large: The places of both sorts.
        sizes: How many elements each of the small ones has.
    """

    is_small: list[bool]
    small: list[int]
    large: list[int]
    sizes: list[int]


# The same gradients come in every step.
@lru_cache(maxsize=64)
def _split(numels: tuple[int, ...]) -> _Split:
    is_small = [numel < SMALL for numel in numels]
    small = list(compress(range(len(numels)), is_small))
    large = list(compress(range(len(numels)), map(not_, is_small)))
    return _Split(is_small, small, large, [numels[place] for place in small])


def read_on_device(
    tensors: list[Tensor], norm_type: float | None
) -> tuple[Tensor, Peaks, Tensor | None]:
    """Return the largest magnitude, those of each when asked, and the norm.

    No host sync. Many small tensors are read through a copy.
    """
    if torch.compiler.is_compiling():
        return _read_each(tensors, norm_type)
    split = _split(tuple(map(Tensor.numel, tensors)))
    if len(split.small) <= FEW:
        return _read_each(tensors, norm_type)
    flat = torch._utils._flatten_dense_tensors([tensors[i] for i in split.small])
    large = [tensors[i] for i in split.large]
    peak, each, norm = _read_each([flat, *large], norm_type)

    # Without the tensors themselves, which it would keep alive.
    def peaks() -> Tensor:
        smalls = iter(torch._foreach_norm(list(flat.split(split.sizes)), math.inf))
        larges = iter(each()[1:])
        mixed = [
            next(smalls).to(peak.dtype) if is_small else next(larges)
            for is_small in split.is_small
        ]
        return torch.stack(mixed)

    return peak, peaks, norm


def _read_each(
    tensors: list[Tensor], norm_type: float | None
) -> tuple[Tensor, Peaks, Tensor | None]:
    wide = _at_least_f32(tensors[0].dtype)
    each = torch.stack(torch._foreach_norm(tensors, math.inf, dtype=wide))
    peak = each.amax()
    if norm_type is None:
        return peak, lambda: each, None
    if norm_type == math.inf:
        return peak, lambda: each, peak
    # MPS and some XPU devices have no f64.
    if tensors[0].device.type in ("cuda", "cpu"):
        wide = torch.float64
    norms = torch._foreach_norm(tensors, norm_type, dtype=wide)
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return peak, lambda: each, norm


def read_on_host(
    tensors: list[Tensor], norm_type: float | None
) -> tuple[Tensor, Peaks | None, Tensor | None]:
    """Return as `read_on_device` does, with None for peaks that are all harmless."""
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
    highest = host_value(peak)
    # Only a peak beyond this can be a culprit, now or when it is unscaled.
    harmless = torch.finfo(dtype).max * 2.0**-32
    each = None if highest <= harmless else peaks_on_host(tensors)
    peaks = None if each is None else lambda: each
    if norm_type is None:
        return peak, peaks, None
    if norm_type == math.inf or not 0.0 < highest < math.inf:
        return peak, peaks, peak
    return peak, peaks, _norm_on_host(pieces, squares, norm_type)


def _pieces(tensors: list[Tensor]) -> list[Tensor]:
    """Return the elements of all tensors as vectors of at most `CHUNK`."""
    small = [tensor for tensor in tensors if tensor.numel() < SMALL]
    flat = [t.reshape(-1) for t in tensors if t.numel() >= SMALL]
    if small:
        flat.append(torch._utils._flatten_dense_tensors(small))
    return [piece for vector in flat for piece in vector.split(CHUNK)]


def peaks_on_host(tensors: list[Tensor]) -> Tensor:
    """Return float[n], the largest magnitude of each, NaN if there is one."""
    extremes = [torch.stack(torch.aminmax(t)).abs().amax() for t in tensors]
    return torch.stack(extremes).to(_at_least_f32(tensors[0].dtype))


def _norm_on_host(
    pieces: list[Tensor], squares: list[Tensor], norm_type: float
) -> Tensor:
    if squares:
        norm = torch.stack(squares).double().sum().sqrt()
        # An overflow is inf; squares that all underflow would look like a norm of 0.
        if 1e-15 < host_value(norm) < math.inf:
            return norm
    norms = [
        torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64)
        for piece in pieces
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _at_least_f32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
