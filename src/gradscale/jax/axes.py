"""Named axes: the axes over which a value varies, and reductions over them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

# The type of `axis_name`: one axis of pmap, vmap or shard_map, or several.
AxisName = Any


class Axes(NamedTuple):
    """The axes over which devices reduce.

    Attributes:
        names: All of them.
        tracked: Those whose varying values JAX tracks: shard_map with check_vma.
    """

    names: tuple[Any, ...]
    tracked: frozenset[Any]

    def differing(self, value: jax.Array) -> frozenset[Any]:
        """Return the axes of a value that JAX knows to hold shards of it."""
        return _varying(value) & self.tracked

    def largest(self, value: jax.Array) -> jax.Array:
        """Return the largest value of all devices."""
        # JAX 0.11 refuses some of the axes if the value varies over others only.
        same = self.tracked - _varying(value)
        names = tuple(name for name in self.names if name not in same)
        return lax.pmax(value, names) if names else value


def axes_of(axis_name: AxisName) -> Axes:
    """Return the axes that `axis_name` names; none for None."""
    if axis_name is None:
        return Axes((), frozenset())
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    # The index of a device always varies: if JAX does not mark it, it tracks nothing.
    tracked = [name for name in names if name in _varying(lax.axis_index(name))]
    return Axes(names, frozenset(tracked))


def all_agree(flag: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return bool[]: the flag is True on every device."""
    return axes_of(axis_name).largest((~flag).astype(jnp.int32)) == 0


def left_to_the_compiler() -> bool:
    """Return True if a mesh axis around this code is not mapped by hand."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in kinds)


def blank_of(fun: Callable[[], Any]) -> Any:
    """Return zeros of the types that `fun` returns, the axes of shards included."""
    traced, shapes = jax.make_jaxpr(fun, return_shape=True)()
    zeros = []
    for kind in traced.out_avals:
        zero = jnp.zeros(kind.shape, kind.dtype)
        axes = tuple(kind.mat.varying)
        zeros.append(lax.pcast(zero, axes, to="varying") if axes else zero)
    return jax.tree.unflatten(jax.tree.structure(shapes), zeros)


def _varying(value: jax.Array) -> frozenset[Any]:
    return jax.typeof(value).mat.varying
