"""One read of the gradients: the largest magnitude of each, and whether all are finite.

The same operations on every backend, sparse gradients included.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

# Where a sparse gradient of TensorFlow or JAX keeps its elements.
SPARSE = {"IndexedSlices": "values", "BCOO": "data"}
LARGEST_F32 = (2.0 - 2.0**-23) * 2.0**127


class Reading(NamedTuple):
    """The result of one read of the gradients.

    Attributes:
        peaks: f32[n], the largest magnitude of each gradient before unscaling: NaN if
            it holds one, inf if it is infinite or becomes so when unscaled.
        finite: bool[], every element is finite and stays so when unscaled.
        amax: f32[], the largest of the peaks of scaled gradients.
    """

    peaks: Any
    finite: Any
    amax: Any


def read(grads: Sequence[Any], scaled: Sequence[bool], scale: Any) -> Reading:
    """Read gradients once. Pure.

    Args:
        grads: float[...] each, dense or sparse; None counts as zero.
        scaled: False for one that was not multiplied by the scale, such as the new
            value of a float8 scale.
        scale: f32[], the scale that multiplied the loss.
    """
    dtype = widest(grads)
    peaks = ops.stack([_peak(grad, dtype) for grad in grads])
    # An empty gradient may have the peak -inf.
    peaks = ops.where(peaks < 0.0, ops.zeros_like(peaks), peaks)
    divisors = ops.where(ops.convert_to_tensor(list(scaled)), scale, 1.0)
    # Rounding is monotonic: if the largest magnitude stays finite, all do.
    kept = ops.isfinite(divided(peaks, divisors))
    if dtype == "float64":
        peaks = ops.where(kept, ops.minimum(peaks, LARGEST_F32), peaks)
    peaks = ops.cast(peaks, "float32")
    peaks = ops.where(kept, peaks, ops.where(ops.isnan(peaks), peaks, math.inf))
    return judged(peaks, scaled)


def judged(peaks: Any, scaled: Sequence[bool]) -> Reading:
    """Return the reading for these peaks.

    Args:
        peaks: f32[n], as in `Reading`.
        scaled: As for `read`.
    """
    counted = ops.where(ops.convert_to_tensor(list(scaled)), peaks, 0.0)
    # Compilers may drop NaN from a maximum, not from a sum.
    amax = ops.where(ops.isnan(ops.sum(counted)), math.nan, ops.max(counted))
    return Reading(peaks, ops.all(ops.isfinite(peaks)), amax)


def multiplied(loss: Any, scale: Any) -> Any:
    """Return a loss times the scale, in f32 at least."""
    dtype = widest([loss])
    return ops.multiply(ops.cast(loss, dtype), ops.cast(scale, dtype))


def divided(grad: Any, scale: Any) -> Any:
    """Return a gradient divided by the scale, in f32 at least; sparse stays sparse."""
    # As Keras does, for any scale; and TensorFlow computes 1 / 2^126 as 0 in a graph.
    dtype = keras.backend.standardize_dtype(grad.dtype)
    if not dtype.startswith("complex"):
        dtype = widest([grad])
    return ops.divide(ops.cast(grad, dtype), ops.cast(scale, dtype))


def widest(values: Sequence[Any]) -> str:
    """Return the dtype of magnitudes: float64 if a value has it, else float32."""
    dtypes = {
        keras.backend.standardize_dtype(value.dtype)
        for value in values
        if value is not None
    }
    return "float64" if dtypes & {"float64", "complex128"} else "float32"


def _peak(grad: Any, dtype: str) -> Any:
    """Return float[], the largest magnitude; NaN if there is one."""
    if grad is None:
        return ops.zeros((), dtype)
    elements = grad
    if type(grad).__name__ in SPARSE:
        elements = getattr(grad, SPARSE[type(grad).__name__])
    if 0 in tuple(elements.shape):
        return ops.zeros((), dtype)
    sizes = ops.abs(elements)
    # A maximum compiled by XLA drops NaN. A sum of magnitudes is NaN exactly if one of
    # them is; its overflow has no effect.
    peak = ops.where(ops.isnan(ops.sum(sizes)), math.nan, ops.max(sizes))
    return ops.cast(peak, dtype)
