"""How large a tensor's values are, and how many of them are not finite."""

from typing import NamedTuple

import torch
from torch import Tensor

# Those whose values can be read as they lie.
LAYOUTS = {torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc}
LARGEST_F32 = torch.finfo(torch.float32).max


class Magnitude(NamedTuple):
    """What was seen in one tensor, on the host.

    Attributes:
        nan: How many elements are NaN.
        inf: How many are infinite.
        elements: How many there are.
        low: The smallest finite value; 0 if there is none.
        high: The largest finite value; 0 if there is none.
        above: How many of the infinite ones are positive: masks have none of these.
    """

    nan: int
    inf: int
    elements: int
    low: float
    high: float
    above: int = 0

    @property
    def finite(self) -> bool:
        """Every element is finite."""
        return not (self.nan or self.inf)

    @property
    def peak(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.low), abs(self.high))


def measured(tensor: Tensor) -> Magnitude | None:
    """Return what is in a tensor; None if it cannot hold inf or NaN. Waits for it."""
    values = _values(tensor)
    if values is None:
        return None
    low, high = (float(end) for end in torch.aminmax(values))
    if _is_finite(low) and _is_finite(high):
        return Magnitude(0, 0, tensor.numel(), low, high)
    nan = int(values.isnan().sum())
    inf = int(values.isinf().sum())
    finite = values[values.isfinite()]
    ends = torch.aminmax(finite) if finite.numel() else (0.0, 0.0)
    return Magnitude(nan, inf, tensor.numel(), float(ends[0]), float(ends[1]))


class Sighting(NamedTuple):
    """What was seen in one tensor, still on its device.

    Attributes:
        counts: i64[3], how many elements are NaN, infinite, and infinite above 0.
        peak: f32[], the largest finite magnitude.
        elements: How many there are.
        dtype: Of the tensor.
    """

    counts: Tensor
    peak: Tensor
    elements: int
    dtype: torch.dtype


def sighted(tensor: Tensor) -> Sighting | None:
    """Return what is in a tensor; None if it cannot hold inf or NaN. No host sync."""
    values = _values(tensor)
    if values is None:
        return None
    sizes = values.abs()
    kinds = (sizes.isnan(), sizes.isinf(), values.isposinf())
    counts = torch.stack([kind.sum() for kind in kinds])
    peak = sizes.nan_to_num_(nan=0.0, posinf=0.0).amax()
    if peak.dtype is torch.float64:
        peak = peak.clamp_(max=LARGEST_F32)
    return Sighting(counts, peak.float(), tensor.numel(), tensor.dtype)


def settled(sightings: list[Sighting]) -> list[Magnitude]:
    """Return the sightings on the host. Waits once for each device."""
    found: dict[int, Magnitude] = {}
    for device in {each.peak.device for each in sightings}:
        places = [i for i, each in enumerate(sightings) if each.peak.device == device]
        counts = torch.stack([sightings[i].counts for i in places]).tolist()
        peaks = torch.stack([sightings[i].peak for i in places]).tolist()
        for i, (nan, inf, above), peak in zip(places, counts, peaks, strict=True):
            elements = sightings[i].elements
            found[i] = Magnitude(nan, inf, elements, -peak, peak, above)
    return [found[i] for i in range(len(sightings))]


def _values(tensor: Tensor) -> Tensor | None:
    """Return the real numbers of a tensor, None if there are none to look at."""
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
    # Eight-bit floats have no kernels of their own for this.
    return tensor.float() if tensor.element_size() == 1 else tensor


def _is_finite(number: float) -> bool:
    return abs(number) < float("inf")
