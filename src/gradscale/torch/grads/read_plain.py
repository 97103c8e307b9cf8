"""One read of gradients of one dtype and device, in plain operations."""

import math

import torch
from torch import Tensor

# Many small reads cost more than one copy: 4000 x 1024 in
# benchmarks/results/step_cpu.json.
SMALL = 16384
# Partial sums of this many squares keep 6 digits in f32, and the piece stays in the
# cache: half the time of two reads, benchmarks/results/step_cpu.json.
CHUNK = 2**20
# A scale that is not known is assumed to be above it; the default `min_scale` is 2^-24.
SAFE = 2.0**-32

_HALVES = (torch.float16, torch.bfloat16)
# The largest magnitude of all; of each tensor, or None; the norm, if requested.
PlainStats = tuple[Tensor, Tensor | None, Tensor | None]


def read_on_device(tensors: list[Tensor], norm_type: float | None) -> PlainStats:
    """Return the peak of all tensors, the peak of each, and the norm. No host sync."""
    each = peaks_on_device(tensors)
    peak = each.amax()
    if norm_type is None:
        return peak, each, None
    if norm_type == math.inf:
        return peak, each, peak
    # MPS and some XPU devices have no f64.
    has_f64 = tensors[0].device.type in ("cuda", "cpu")
    norms = torch._foreach_norm(
        tensors, norm_type, dtype=torch.float64 if has_f64 else each.dtype
    )
    return peak, each, torch.linalg.vector_norm(torch.stack(norms), norm_type)


def read_on_host(
    tensors: list[Tensor], norm_type: float | None, scale: Tensor | None = None
) -> PlainStats:
    """As `read_on_device`, but per-tensor peaks are None if none can be a culprit.

    Args:
        tensors: On the CPU.
        norm_type: The order of the norm; None for none.
        scale: f32[], they will be divided by it; None if it is not known.
    """
    dtype = tensors[0].dtype
    lowest = SAFE
    # Reading a scale on another device would wait for it.
    if scale is not None and scale.device.type == "cpu":
        lowest = min(scale.item(), SAFE)
    harmless = torch.finfo(dtype).max * lowest
    if sum(map(Tensor.numel, tensors)) < SMALL and dtype not in _HALVES:
        return _read_small(tensors, norm_type, harmless)
    add_squares = norm_type == 2.0 and dtype in (torch.float32, torch.float64)
    pieces = _pieces(tensors)
    extremes: list[Tensor] = []
    squares: list[Tensor] = []
    for piece in pieces:
        extremes += torch.aminmax(piece)
        if add_squares:
            # While the piece is in the cache: memory is read once.
            squares.append(torch.dot(piece, piece))
    peak = torch.stack(extremes).abs_().amax()
    if dtype in _HALVES:
        peak = peak.float()
    highest = peak.item()
    each = None if highest <= harmless else peaks_on_host(tensors)
    if norm_type is None:
        return peak, each, None
    if norm_type == math.inf or not 0.0 < highest < math.inf:
        return peak, each, peak
    return peak, each, _norm_on_host(pieces, squares, norm_type)


def _read_small(
    tensors: list[Tensor], norm_type: float | None, harmless: float
) -> PlainStats:
    """Read few elements, where each operation costs more than a pass over them."""
    flat = torch._utils._flatten_dense_tensors(tensors)
    # Ten times faster on a CPU than the norm of order infinity.
    low, high = torch.aminmax(flat)
    peak = torch.maximum(high, low.neg())
    each = None if peak.item() <= harmless else peaks_on_host(tensors)
    if norm_type is None or norm_type == math.inf:
        return peak, each, None if norm_type is None else peak
    return peak, each, torch.linalg.vector_norm(flat, norm_type, dtype=torch.float64)


def peaks_on_device(tensors: list[Tensor]) -> Tensor:
    """Return float[n], the largest magnitude of each; NaN if it contains NaN."""
    wide = _at_least_f32(tensors[0].dtype)
    return torch.stack(torch._foreach_norm(tensors, math.inf, dtype=wide))


def peaks_on_host(tensors: list[Tensor]) -> Tensor:
    """Return float[n], the largest magnitude of each; NaN if it contains NaN."""
    extremes = [torch.stack(torch.aminmax(t)).abs().amax() for t in tensors]
    return torch.stack(extremes).to(_at_least_f32(tensors[0].dtype))


def _pieces(tensors: list[Tensor]) -> list[Tensor]:
    """Return the elements of all tensors as vectors of at most `CHUNK`."""
    small = [tensor for tensor in tensors if tensor.numel() < SMALL]
    flat = [t.reshape(-1) for t in tensors if t.numel() >= SMALL]
    if small:
        flat.append(torch._utils._flatten_dense_tensors(small))
    return [piece for vector in flat for piece in vector.split(CHUNK)]


def _norm_on_host(
    pieces: list[Tensor], squares: list[Tensor], norm_type: float
) -> Tensor:
    if squares:
        norm = torch.stack(squares).double().sum().sqrt()
        # An overflow is inf; squares that all underflow would look like a norm of 0.
        if 1e-15 < norm.item() < math.inf:
            return norm
    norms = [
        torch.linalg.vector_norm(piece, norm_type, dtype=torch.float64)
        for piece in pieces
    ]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _at_least_f32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
