"""Counts a tensor's non-finite elements and measures its finite range."""

from typing import NamedTuple

import torch
from torch import Tensor

# Layouts whose values can be read without a conversion.
LAYOUTS = {torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}
LARGEST_F32 = torch.finfo(torch.float32).max


class TensorStats(NamedTuple):
    """Statistics of one tensor, on the host.

    Attributes:
        nan: Number of NaN elements.
        inf: Number of infinite elements.
        elements: Number of all elements.
        dtype: Of the tensor.
        low: The smallest finite value; 0 if there is none.
        high: The largest finite value; 0 if there is none.
        pos_inf: Number of elements that are +inf: a mask has none.
        wide: Number of finite elements that float16 cannot represent. Zero means that
            the values were in float16 before; measured on the device only.
    """

    nan: int
    inf: int
    elements: int
    dtype: torch.dtype
    low: float
    high: float
    pos_inf: int = 0
    wide: int = 1

    @property
    def finite(self) -> bool:
        """Every element is finite."""
        return not (self.nan or self.inf)

    @property
    def kind(self) -> str:
        """Return "nan" or "inf", for a tensor that is not finite."""
        return "nan" if self.nan else "inf"

    @property
    def peak(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.low), abs(self.high))


def stats_of(tensor: Tensor) -> TensorStats | None:
    """Return a tensor's statistics; None if it cannot hold inf or NaN. Syncs."""
    values = _values(tensor)
    if values is None:
        return None
    low, high = (float(end) for end in torch.aminmax(values))
    if _is_finite(low) and _is_finite(high):
        return TensorStats(0, 0, tensor.numel(), tensor.dtype, low, high)
    nan = int(values.isnan().sum())
    inf = int(values.isinf().sum())
    finite = values[values.isfinite()]
    ends = torch.aminmax(finite) if finite.numel() else (0.0, 0.0)
    low, high = (float(end) for end in ends)
    return TensorStats(nan, inf, tensor.numel(), tensor.dtype, low, high)


class DeviceStats(NamedTuple):
    """Statistics of one tensor, still on its device.

    Attributes:
        counts: i64[4], number of NaN, infinite and +inf elements, and of finite ones
            that are no float16.
        peak: f32[], the largest finite magnitude.
        elements: Number of all elements.
        dtype: Of the tensor.
    """

    counts: Tensor
    peak: Tensor
    elements: int
    dtype: torch.dtype


def device_stats_of(tensor: Tensor) -> DeviceStats | None:
    """Return a tensor's statistics; None if it cannot hold inf or NaN. No host sync."""
    values = _values(tensor)
    if values is None:
        return None
    magnitudes = values.abs()
    flags = [magnitudes.isnan(), magnitudes.isinf(), values.isposinf()]
    # NaN differs from itself, and infinity does not.
    flags.append((values != values.half()) & ~flags[0])
    counts = torch.stack([flag.sum() for flag in flags])
    peak = magnitudes.nan_to_num_(nan=0.0, posinf=0.0).amax()
    if peak.dtype is torch.float64:
        peak = peak.clamp_(max=LARGEST_F32)
    return DeviceStats(counts, peak.float(), tensor.numel(), tensor.dtype)


def to_host(stats: list[DeviceStats]) -> list[TensorStats]:
    """Copy statistics to the host, in order. Syncs once per device."""
    found: dict[int, TensorStats] = {}
    for device in {each.peak.device for each in stats}:
        indices = [i for i, each in enumerate(stats) if each.peak.device == device]
        counts = torch.stack([stats[i].counts for i in indices]).tolist()
        peaks = torch.stack([stats[i].peak for i in indices]).tolist()
        for i, (nan, inf, pos_inf, wide), peak in zip(
            indices, counts, peaks, strict=True
        ):
            elements, dtype = stats[i].elements, stats[i].dtype
            found[i] = TensorStats(
                nan, inf, elements, dtype, -peak, peak, pos_inf, wide
            )
    return [found[i] for i in range(len(stats))]


def _values(tensor: Tensor) -> Tensor | None:
    """Return the elements as real numbers; None if none can be inf or NaN."""
    tensor = tensor.detach()
    if tensor.is_nested or tensor.layout not in LAYOUTS:
        return None
    if tensor.is_sparse:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return None
    # 8-bit floats have no kernels for these reductions.
    return tensor.float() if tensor.element_size() == 1 else tensor


def _is_finite(number: float) -> bool:
    return abs(number) < float("inf")
