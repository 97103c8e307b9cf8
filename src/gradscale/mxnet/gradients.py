"""Reads, unscales, measures and discards the gradients on all devices."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from mxnet import autograd, nd


class Reading(NamedTuple):
    """The result of one read of the gradients.

    Attributes:
        names: The name of the parameter of each gradient; with several devices also
            the device, as in "dense0_weight@cpu(1)".
        peaks: The largest magnitude in each; NaN if there is a NaN.
    """

    names: tuple[str, ...]
    peaks: tuple[float, ...]

    @property
    def finite(self) -> bool:
        """True if every element is finite."""
        return all(map(math.isfinite, self.peaks))

    @property
    def nan(self) -> bool:
        """True if an element is NaN."""
        return any(map(math.isnan, self.peaks))

    @property
    def amax(self) -> float:
        """The largest magnitude."""
        return math.nan if self.nan else max(self.peaks, default=0.0)

    @property
    def culprits(self) -> list[str]:
        """The names of the gradients that are not finite."""
        pairs = zip(self.names, self.peaks, strict=True)
        return [name for name, peak in pairs if not math.isfinite(peak)]

    def by_name(self) -> dict[str, float]:
        """Return the peaks by name."""
        return dict(zip(self.names, self.peaks, strict=True))


def read(params: Iterable[Any]) -> Reading:
    """Read every gradient on every device once. Waits for the devices.

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=(2,))
    >>> weight.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    >>> weight.grad(mx.cpu(1))[:] = [3.0, float("inf")]
    >>> read([weight])
    Reading(names=('weight@cpu(0)', 'weight@cpu(1)'), peaks=(0.0, inf))
    """
    found = list(_gradients(params))
    peaks = _to_host([_peak(each.grad) for each in found])
    return Reading(tuple(each.name for each in found), tuple(peaks))


def norm(params: Iterable[Any], reading: Reading) -> float:
    """Return the L2 norm of all gradients of the first device. Waits for the device.

    Cannot overflow or underflow: each gradient is divided by its peak first.

    >>> import mxnet as mx
    >>> weight = mx.gluon.Parameter("weight", shape=(2,), dtype="float16")
    >>> weight.initialize()
    >>> weight.grad()[:] = [30000.0, 40000.0]
    >>> norm([weight], read([weight]))
    50000.0

    Args:
        params: The parameters.
        reading: Of the same gradients; all finite.
    """
    pairs = zip(_gradients(params), reading.peaks, strict=True)
    first = [(peak, each.grad) for each, peak in pairs if peak > 0.0 and each.first]
    with autograd.pause():
        norms = [(_dense(grad).astype("float64") / peak).norm() for peak, grad in first]
    return math.hypot(
        *(peak * each for (peak, _), each in zip(first, _to_host(norms), strict=True))
    )


def unscale_(params: Iterable[Any], factor: float) -> None:
    """Multiply every gradient on every device by a factor, in place."""
    with autograd.pause():
        for each in _gradients(params):
            each.grad[:] *= factor


def discard_(params: Iterable[Any]) -> None:
    """Set gradients to 0 and mark them as used: no later step takes them.

    Without this a parameter that the next batch does not use would fail that step too.
    """
    for param in params:
        # Not `zero_grad` of the parameter: it fails on arrays of the numpy interface.
        for grad in param._grad or []:
            legacy = grad.as_nd_ndarray()
            nd.zeros_like(legacy, out=legacy)
        for data in param._data if param._grad else []:
            data._fresh_grad = False


def float16_names(params: Iterable[Any]) -> list[str]:
    """Return the names of the float16 gradients."""
    return [each.name for each in _gradients(params) if each.grad.dtype == np.float16]


class _Gradient(NamedTuple):
    """One gradient on one device."""

    name: str
    grad: Any
    first: bool


def _gradients(params: Iterable[Any]) -> Iterator[_Gradient]:
    """Yield each gradient on each device."""
    for param in params:
        # None: frozen, or not initialized yet.
        grads = param._grad or []
        for place, grad in enumerate(grads):
            name = param.name if len(grads) == 1 else f"{param.name}@{grad.context}"
            yield _Gradient(name, grad.as_nd_ndarray(), place == 0)


def _dense(grad: Any) -> Any:
    """Return the elements that are stored: of a sparse gradient, those of its rows."""
    return grad if grad.stype == "default" else grad.data


def _peak(grad: Any) -> Any:
    """Return float[1], the largest magnitude; NaN wins over all others."""
    stored = _dense(grad)
    with autograd.pause():
        if stored.size == 0:
            return nd.zeros((1,), ctx=grad.context)
        return nd.max(nd.abs(stored))


def _to_host(values: list[Any]) -> list[float]:
    """Return arrays of one element as floats; one copy for each device."""
    by_device: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        by_device.setdefault(value.context, []).append(index)
    found = [0.0] * len(values)
    with autograd.pause():
        for places in by_device.values():
            wide = [values[i].astype("float64").reshape((1,)) for i in places]
            for index, number in zip(
                places, nd.concat(*wide, dim=0).asnumpy(), strict=True
            ):
                found[index] = float(number)
    return found
