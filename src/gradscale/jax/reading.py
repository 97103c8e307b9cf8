"""One read of the gradients: finiteness, largest magnitude, norm and peaks."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradscale.core.state import Observed
from gradscale.jax.axes import Axes, AxisName, axes_of, left_to_the_compiler
from gradscale.jax.grad_tree import Mask, gradients_in
from gradscale.jax.reduce import Facts, computed_once, sweep, sweep_together
from gradscale.jax.state import scale_of

# Squares are summed twice, of values made larger and smaller by this factor: one of
# the sums neither overflows nor vanishes for any norm from 2^-113 to 2^113.
SHIFT = 2.0**50
LARGEST_F32 = float(jnp.finfo(jnp.float32).max)


class Reading(NamedTuple):
    """The result of one read of the gradients.

    Attributes:
        finite: bool[], every element is finite and stays so once unscaled.
        amax: f32[], the largest magnitude among the gradients before unscaling.
        norm: f32[], the norm of the unscaled gradients.
        peaks: f32[] for each leaf in the gradients' own structure: its largest
            magnitude, NaN if there is one; 0 for a leaf that the mask leaves out.
    """

    finite: jax.Array
    amax: jax.Array
    norm: jax.Array
    peaks: Any

    def observed(self, loss_finite: Any = True) -> Observed:
        """Return the input of a policy's rule."""
        return Observed(self.finite, self.amax, jnp.asarray(loss_finite))


def observe(
    grads: Any, state: Any = 1.0, *, axis_name: AxisName = None, mask: Mask = None
) -> Reading:
    """Read gradients once. Pure.

    Args:
        grads: A tree of floats as `jax.grad` returned it, any mix of dtypes.
        state: The holder of the scale that multiplied the loss: a policy's state, the
            state of an optimizer with `loss_scaled` in it, or a number. Leave it out
            for gradients that are unscaled already.
        axis_name: Axes of pmap, vmap or shard_map over which all must agree. Under
            shard_map a leaf that varies over an axis is a shard: its squares are
            summed over the axis. Without tracking (pmap, check_vma=False) every leaf
            is treated as a replica.
        mask: True for scaled gradients, False for leaves that are not gradients,
            such as fp8 scales; those are not read.

    Raises:
        GradientError: A leaf is an integer or float0, or there is no leaf.

    >>> seen = observe({"w": jnp.array([3.0, 4.0]) * 8.0}, 8.0)
    >>> bool(seen.finite), float(seen.amax), float(seen.norm)
    (True, 32.0, 5.0)
    """
    leaves, flags, structure = gradients_in(grads, mask)
    inverse = 1.0 / scale_of(state)
    finite, amax, norm, peaks = read(leaves, flags, inverse, axes_of(axis_name))
    return Reading(finite, amax, norm, jax.tree.unflatten(structure, list(peaks)))


def all_finite(tree: Any, *, axis_name: AxisName = None, mask: Mask = None) -> Any:
    """Return bool[]: every element of every leaf is finite, on every device.

    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
    """
    return observe(tree, axis_name=axis_name, mask=mask).finite


def read(
    leaves: Sequence[Any], flags: Sequence[bool], inverse: jax.Array, axes: Axes
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Read the flagged leaves once.

    Args:
        leaves: float[...] each.
        flags: Which of them to read.
        inverse: f32[], by which a gradient is multiplied to unscale it.
        axes: Those over which devices agree.

    Returns:
        finite bool[], amax f32[], norm f32[], and f32[n] with each leaf's peak.
    """
    wanted = [(place, leaf) for place, leaf in enumerate(leaves) if flags[place]]
    # With one device, or where the code runs on every device's own part, no array is
    # sharded. On the CPU a reduction of several arrays adds one by one, and loses
    # digits.
    by_hand = bool(axes.names) and not left_to_the_compiler()
    unsharded = by_hand or jax.device_count() == 1
    found = sweep_together if unsharded and jax.default_backend() == "gpu" else sweep
    # Leaves that are not read come first and count as 0.
    order = [place for place, flag in enumerate(flags) if not flag]
    peaks = [jnp.zeros(len(order), jnp.float32)]
    totals: dict[Any, Facts] = {}
    for places, facts in found(wanted, inverse, SHIFT, axes.differing):
        order += places
        peaks.append(_as_f32(facts.peak()))
        kind = facts.bits.dtype, axes.differing(facts.small)
        totals[kind] = facts.total().joined(totals.get(kind))
    finite, amax = jnp.asarray(True), jnp.float32(0.0)
    small = large = jnp.float32(0.0)
    for total in totals.values():
        agreed = _agreed(total, axes)
        peak = agreed.peak()
        # Rounding is monotonic: if the largest magnitude stays finite, all do.
        finite &= jnp.isfinite(peak * inverse)
        amax = jnp.maximum(amax, _as_f32(peak))
        small, large = small + agreed.small, large + agreed.large
    in_order = jnp.concatenate(peaks)[np.argsort(order)]
    scalars = jnp.stack([finite.astype(jnp.float32), amax, _norm(small, large)])
    if found is sweep:
        (scalars,) = computed_once(scalars)
    flag, amax, norm = scalars
    return flag > 0.0, amax, norm, _largest_over(in_order, axes)


def _agreed(total: Facts, axes: Axes) -> Facts:
    """Return the total of all devices: the largest peak, the sums over shards."""
    shards = tuple(axes.differing(total.small))
    small, large = total.small, total.large
    if shards:
        small, large = lax.psum((small, large), shards)
    bits = axes.largest(total.bits)
    return Facts(bits, small.astype(jnp.float32), large.astype(jnp.float32))


def _largest_over(peaks: jax.Array, axes: Axes) -> jax.Array:
    """Return the largest peaks of all devices, as integers on the way."""
    bits = axes.largest(lax.bitcast_convert_type(peaks, jnp.int32))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _as_f32(peak: jax.Array) -> jax.Array:
    """Return peaks as f32; a finite f64 beyond its range becomes the largest f32."""
    held = jnp.where(jnp.isfinite(peak), jnp.minimum(peak, LARGEST_F32), peak)
    return held.astype(jnp.float32)


def _norm(small: jax.Array, large: jax.Array) -> jax.Array:
    """Return the root of the sum that did not overflow."""
    overflown = ~(small < jnp.inf)
    squares = jnp.where(overflown, large, small)
    # The root's slope at 0 is infinite: the other branch keeps gradients finite.
    positive = jnp.where(squares > 0.0, squares, 1.0)
    root = jnp.where(squares > 0.0, jnp.sqrt(positive), squares)
    return root * jnp.where(overflown, SHIFT, 1.0 / SHIFT)
