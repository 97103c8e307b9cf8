"""One pass over many arrays: peaks and sums of squares, in few kernels."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradscale.jax.leaves import wide

# A row at least this long is worth a reduction of its own: what is left for the second
# stage is then a small part of the array.
LONG_ROW = 64
# Up to here arrays of one shape are put side by side as they are.
SMALL = 2**14


class Facts(NamedTuple):
    """What is known of some arrays, or of parts of them.

    For IEEE floats the bits of |x|, read as an integer, order finite < inf < NaN.
    Integers survive a maximum over devices, where floats may lose a NaN.

    Attributes:
        bits: i32[...] or i64[...], the bits of the largest magnitude.
        small: float[...], the sum of squares of the values made larger, so that it
            does not vanish.
        large: float[...], the sum of squares of the values made smaller, so that it
            does not overflow.
    """

    bits: jax.Array
    small: jax.Array
    large: jax.Array

    def peak(self) -> jax.Array:
        """Return the largest magnitude as the float it is."""
        width = jnp.float64 if self.bits.dtype == jnp.int64 else jnp.float32
        return lax.bitcast_convert_type(self.bits, width)


def sweep(
    leaves: Sequence[tuple[int, Any]],
    inverse: jax.Array,
    shift: float,
    kind: Callable[[jax.Array], Any],
    *,
    together: bool,
) -> Iterator[tuple[list[int], Facts]]:
    """Read each array once; yield the facts of those that could be taken together.

    Args:
        leaves: (place, float[...]) each.
        inverse: f32[], multiplies every element before it is squared.
        shift: The power of two by which elements are made larger or smaller.
        kind: What must be equal for arrays to be taken together.
        together: All three facts in one reduction, and small arrays side by side.
            Fewer kernels, but the compiler would gather arrays that it has sharded.

    Yields:
        The places of some arrays, and their facts, as many of each.
    """
    reduced = _together if together else _apart
    small, large = _grouped(leaves, kind, SMALL if together else 0)
    for places, arrays in small:
        facts = _elements(jnp.stack(arrays), inverse, shift)
        yield places, reduced(tuple(range(1, facts.bits.ndim)), facts)
    for places, arrays in large:
        axes = _own_axes(arrays[0].shape, together)
        parts = [reduced(axes, _elements(a, inverse, shift)) for a in arrays]
        facts = Facts(*map(jnp.stack, zip(*parts, strict=True)))
        yield places, reduced(tuple(range(1, facts.bits.ndim)), facts)


Group = tuple[list[int], list[jax.Array]]


def _grouped(
    leaves: Sequence[tuple[int, Any]], kind: Callable[[jax.Array], Any], limit: int
) -> tuple[list[Group], list[Group]]:
    """Return arrays of equal shape, dtype and kind: those up to a limit, the others."""
    groups: dict[Any, Group] = defaultdict(lambda: ([], []))
    for place, leaf in leaves:
        array = wide(leaf)
        places, arrays = groups[array.shape, array.dtype, kind(array)]
        places.append(place)
        arrays.append(array)
    found = list(groups.values())
    small = [group for group in found if group[1][0].size <= limit]
    return small, [group for group in found if group[1][0].size > limit]


def _elements(values: jax.Array, inverse: jax.Array, shift: float) -> Facts:
    """Return the facts of every element; the compiler never stores them."""
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        real, imag = (
            _elements(f(values), inverse, shift) for f in (jnp.real, jnp.imag)
        )
        bits = jnp.maximum(real.bits, imag.bits)
        return Facts(bits, real.small + imag.small, real.large + imag.large)
    unscaled = values * inverse
    small, large = unscaled * shift, unscaled / shift
    return Facts(_magnitude_bits(values), small * small, large * large)


def _magnitude_bits(values: jax.Array) -> jax.Array:
    signed = jnp.int64 if values.dtype.itemsize == 8 else jnp.int32
    bits = lax.bitcast_convert_type(lax.stop_gradient(values), signed)
    return bits & jnp.iinfo(signed).max


def _own_axes(shape: tuple[int, ...], together: bool) -> tuple[int, ...]:
    """Return the axes over which a large array is reduced by itself."""
    # Rows are one kernel, a whole array is two; and rows of arrays of one shape can be
    # finished together: benchmarks/results/jax_update_h200.json.
    rows = together and len(shape) > 1 and shape[-1] >= LONG_ROW
    return (len(shape) - 1,) if rows else tuple(range(len(shape)))


def _apart(axes: tuple[int, ...], facts: Facts) -> Facts:
    """Reduce each of the facts over some axes."""
    bits = jnp.max(facts.bits, axes, initial=0)
    return Facts(bits, jnp.sum(facts.small, axes), jnp.sum(facts.large, axes))


def _together(axes: tuple[int, ...], facts: Facts) -> Facts:
    """Do what `_apart` does in one reduction."""
    return Facts(*_reduced(axes, *facts)) if axes else facts


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduced(axes: tuple[int, ...], *facts: Any) -> Any:
    def join(a: Any, b: Any) -> Any:
        return lax.max(a[0], b[0]), lax.add(a[1], b[1]), lax.add(a[2], b[2])

    zeros = tuple(np.zeros((), fact.dtype) for fact in facts)
    return tuple(lax.reduce(facts, zeros, join, axes))


@_reduced.defjvp
def _reduced_jvp(axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    # Reductions of several arrays have no derivative of their own; sums are linear.
    reduced = _reduced(axes, *primals)
    bits = np.zeros(reduced[0].shape, jax.dtypes.float0)
    return reduced, (bits, *(jnp.sum(tangent, axes) for tangent in tangents[1:]))
