"""One read of gradients of one kind in plain operations."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import compress, groupby
from operator import not_
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.devices import host_value

# Many small reads cost more than one copy: 4000 x 1024 in
# benchmarks/results/step_cpu.json.
SMALL = 16384
# So few small ones are read one by one; so few sizes are.
FEW = 8
# The copy is kept while the peaks of each may be asked for, some steps: where it is at
# most this share of all.
KEPT = 1e-3
# Elements of a copy that is not kept: 16 MiB of f32.
COPIED = 2**22
# Partial sums of this many squares keep 6 digits in f32, and the piece stays in the
# cache: half the time of two reads, benchmarks/results/step_cpu.json.
CHUNK = 2**20

Peaks = Callable[[], Tensor]


class _Piece(NamedTuple):
    """Small tensors that are copied side by side.

    Attributes:
        places: Of each.
        sizes: How many elements each has.
        alike: How many there are of one size, one after the other; with that size.
    """

    places: list[int]
    sizes: list[int]
    alike: list[tuple[int, int]]


class _Split(NamedTuple):
    """Which of some tensors are read through a copy.

    Attributes:
        is_small: For each tensor, whether it is.
        small: The small ones as one piece, in their order.
        large: The places of the others.
        share: How many of all elements are in small ones.
        pieces: The small ones by size, in pieces that a copy does not hurt.
        order: Where each tensor comes among all pieces and the large ones.
    """

    is_small: list[bool]
    small: _Piece
    large: list[int]
    share: float
    pieces: list[_Piece]
    order: list[int]


# The same gradients come in every step.
@lru_cache(maxsize=64)
def _split(numels: tuple[int, ...]) -> _Split:
    is_small = [numel < SMALL for numel in numels]
    places = list(compress(range(len(numels)), is_small))
    large = list(compress(range(len(numels)), map(not_, is_small)))
    small = _piece(places, numels)
    pieces, begin, filled = [], 0, 0
    by_size = sorted(places, key=numels.__getitem__)
    for end, place in enumerate(by_size):
        filled += numels[place]
        if filled > COPIED:
            pieces.append(_piece(by_size[begin:end], numels))
            begin, filled = end, numels[place]
    pieces.append(_piece(by_size[begin:], numels))
    read = [*by_size, *large]
    order = sorted(range(len(numels)), key=read.__getitem__)
    share = sum(small.sizes) / max(sum(numels), 1)
    return _Split(is_small, small, large, share, pieces, order)


def _piece(places: list[int], numels: tuple[int, ...]) -> _Piece:
    sizes = [numels[place] for place in places]
    alike = [(len(list(same)), size) for size, same in groupby(sizes)]
    return _Piece(places, sizes, alike)


def read_on_device(
    tensors: list[Tensor], norm_type: float | None
) -> tuple[Tensor, Peaks, Tensor | None]:
    """Return the largest magnitude, those of each when asked, and the norm.

    No host sync. Many small tensors are read through a copy.
    """
    if torch.compiler.is_compiling():
        return _read_each(tensors, norm_type)
    split = _split(tuple(map(Tensor.numel, tensors)))
    if len(split.small.places) <= FEW:
        return _read_each(tensors, norm_type)
    if split.share > KEPT:
        return _read_in_pieces(tensors, split, norm_type)
    flat = _flat(tensors, split.small)
    large = [tensors[i] for i in split.large]
    peak, each, norm = _read_each([flat, *large], norm_type)

    # Without the tensors themselves, which it would keep alive.
    def peaks() -> Tensor:
        smalls = iter(_peaks_of(flat, split.small, peak.dtype))
        larges = iter(each()[1:])
        return torch.stack([next(smalls if s else larges) for s in split.is_small])

    return peak, peaks, norm


def _read_in_pieces(
    tensors: list[Tensor], split: _Split, norm_type: float | None
) -> tuple[Tensor, Peaks, Tensor | None]:
    """Read as `read_on_device` does, and keep no copy: the peaks are taken at once."""
    each: list[Tensor] = []
    norms: list[Tensor] = []
    for piece in split.pieces:
        flat = _flat(tensors, piece)
        each.append(_peaks_of(flat, piece, _at_least_f32(flat.dtype)))
        if norm_type is not None and norm_type != math.inf:
            # Unlike torch.linalg.vector_norm, it needs no wide copy.
            norms += torch._foreach_norm([flat], norm_type, dtype=_for_norms(flat))
    if split.large:
        _, larges, norm = _read_each([tensors[i] for i in split.large], norm_type)
        each.append(larges())
        norms += [] if norm is None else [norm]
    found = torch.cat(each)
    peak = found.amax()

    def peaks() -> Tensor:
        apart = found.unbind()
        return torch.stack([apart[place] for place in split.order])

    if norm_type is None or norm_type == math.inf:
        return peak, peaks, None if norm_type is None else peak
    return peak, peaks, torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _flat(tensors: list[Tensor], piece: _Piece) -> Tensor:
    chosen = [tensors[i] for i in piece.places]
    # Most of them are vectors: a view of each would take longer than the copy.
    if set(map(Tensor.dim, chosen)) == {1}:
        return torch.cat(chosen)
    return torch._utils._flatten_dense_tensors(chosen)


def _peaks_of(flat: Tensor, piece: _Piece, dtype: torch.dtype) -> Tensor:
    """Return the largest magnitude of each tensor of a piece."""
    if len(piece.alike) > FEW:
        norms = torch._foreach_norm(list(flat.split(piece.sizes)), math.inf)
        return torch.stack(norms).to(dtype)
    parts = flat.split([count * size for count, size in piece.alike])
    rows = [part.view(alike) for part, alike in zip(parts, piece.alike, strict=True)]
    return torch.cat(
        [torch.linalg.vector_norm(row, math.inf, dim=1, dtype=dtype) for row in rows]
    )


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
    norms = torch._foreach_norm(tensors, norm_type, dtype=_for_norms(tensors[0]))
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


def _for_norms(like: Tensor) -> torch.dtype:
    # MPS and some XPU devices have no f64.
    has_f64 = like.device.type in ("cuda", "cpu")
    return torch.float64 if has_f64 else _at_least_f32(like.dtype)


def _at_least_f32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
