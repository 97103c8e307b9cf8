"""One pass over many arrays: peaks and sums of squares, in few kernels."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradscale.jax.grad_tree import wide

# A row at least this long is reduced by itself: the input of the second stage is then
# a small part of the array.
LONG_ROW = 64
# Arrays of one shape up to this size are stacked before they are reduced.
SMALL = 2**14


class Facts(NamedTuple):
    """Statistics of some arrays, or of parts of them.

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

    def total(self) -> "Facts":
        """Return the facts of all arrays together."""
        bits = jnp.max(self.bits, initial=0)
        return Facts(bits, jnp.sum(self.small), jnp.sum(self.large))

    def joined(self, other: "Facts | None") -> "Facts":
        """Return the facts of these arrays and others; None for no others."""
        if other is None:
            return self
        bits = jnp.maximum(self.bits, other.bits)
        return Facts(bits, self.small + other.small, self.large + other.large)


def sweep(
    leaves: Sequence[tuple[int, Any]],
    inverse: jax.Array,
    shift: float,
    kind: Callable[[jax.Array], Any],
) -> Iterator[tuple[list[int], Facts]]:
    """Read each array once; yield the facts of all of one kind.

    Args:
        leaves: (place, float[...]) each.
        inverse: f32[], multiplies every element before it is squared.
        shift: The power of two by which elements are made larger or smaller.
        kind: A key that is equal for arrays that may be grouped.

    Yields:
        The places of some arrays, and the facts of each.
    """
    groups = defaultdict(list)
    for place, leaf in leaves:
        total = _elements(wide(leaf), inverse, shift).total()
        groups[total.bits.dtype, kind(total.small)].append((place, total))
    for members in groups.values():
        places, totals = zip(*members, strict=True)
        facts = map(jnp.stack, zip(*totals, strict=True))
        yield list(places), Facts(*computed_once(*facts))


def computed_once(*values: jax.Array) -> tuple[jax.Array, ...]:
    """Return vectors unchanged, so that no kernel recomputes them.

    On the CPU XLA repeats sums and comparisons in every kernel that uses their result,
    so that each of 300 updates would join the facts of 300 arrays: minutes to compile.
    It never repeats a sort; the keys are sorted already.
    """
    keys = jnp.arange(values[0].size)
    return tuple(lax.sort((keys, *values), num_keys=1)[1:])


def sweep_together(
    leaves: Sequence[tuple[int, Any]],
    inverse: jax.Array,
    shift: float,
    kind: Callable[[jax.Array], Any],
) -> Iterator[tuple[list[int], Facts]]:
    """Do the same as `sweep` in few kernels; not for arrays that the compiler sharded.

    All three facts in one reduction, small arrays side by side, rows of large arrays
    first: benchmarks/results/jax_update_h200.json. A sharded array would be gathered.
    """
    small, large = _grouped(leaves, kind)
    for places, arrays in small:
        facts = _elements(jnp.stack(arrays), inverse, shift)
        yield places, _reduced(tuple(range(1, facts.bits.ndim)), facts)
    for places, arrays in large:
        axes = _own_axes(arrays[0].shape)
        parts = [_reduced(axes, _elements(a, inverse, shift)) for a in arrays]
        facts = Facts(*map(jnp.stack, zip(*parts, strict=True)))
        yield places, _reduced(tuple(range(1, facts.bits.ndim)), facts)


Group = tuple[list[int], list[jax.Array]]


def _grouped(
    leaves: Sequence[tuple[int, Any]], kind: Callable[[jax.Array], Any]
) -> tuple[list[Group], list[Group]]:
    """Return arrays of equal shape, dtype and kind: the small ones, the large ones."""
    groups: dict[Any, Group] = defaultdict(lambda: ([], []))
    for place, leaf in leaves:
        array = wide(leaf)
        places, arrays = groups[array.shape, array.dtype, kind(array)]
        places.append(place)
        arrays.append(array)
    found = list(groups.values())
    small = [group for group in found if group[1][0].size <= SMALL]
    return small, [group for group in found if group[1][0].size > SMALL]


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


def _own_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes over which a large array is reduced by itself."""
    # Rows are one kernel, a whole array is two; and rows of arrays of one shape can be
    # finished together.
    rows = len(shape) > 1 and shape[-1] >= LONG_ROW
    return (len(shape) - 1,) if rows else tuple(range(len(shape)))


def _reduced(axes: tuple[int, ...], facts: Facts) -> Facts:
    """Reduce the three facts over some axes, in one pass."""
    return Facts(*_reduce(axes, *facts)) if axes else facts


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduce(axes: tuple[int, ...], *facts: Any) -> Any:
    def join(a: Any, b: Any) -> Any:
        return lax.max(a[0], b[0]), lax.add(a[1], b[1]), lax.add(a[2], b[2])

    zeros = tuple(np.zeros((), fact.dtype) for fact in facts)
    return tuple(lax.reduce(facts, zeros, join, axes))


@_reduce.defjvp
def _reduce_jvp(axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    # Reductions of several arrays have no derivative of their own; sums are linear.
    reduced = _reduce(axes, *primals)
    bits = np.zeros(reduced[0].shape, jax.dtypes.float0)
    return reduced, (bits, *(jnp.sum(tangent, axes) for tangent in tangents[1:]))
