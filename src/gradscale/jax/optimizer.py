"""Loss scaling around any optax optimizer."""

import math
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradscale.core.policies import Policy
from gradscale.core.state import Observed, f32
from gradscale.errors import ConfigError, GradientError
from gradscale.jax.axes import AxisName, all_agree, axes_of
from gradscale.jax.grad_tree import Mask, gradients_in, same_places, wide
from gradscale.jax.last_step import Counts, LastStep, packed
from gradscale.jax.reading import read
from gradscale.jax.scaling import multiplied, select, update
from gradscale.jax.state import (
    LossScaledState,
    check_policy,
    first_state,
    warn_if_unscaled,
)

# The smallest normal f32: XLA flushes subnormals to zero on the CPU.
SMALLEST = 2.0**-126


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: Policy,
    *,
    axis_name: AxisName = None,
    mask: Mask = None,
    max_norm: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it takes the gradients of a scaled loss.

    Each update reads the gradients once. If all are finite they are unscaled in f32,
    clipped, and passed to `inner`; otherwise the updates are zeros and the state of
    `inner` is unchanged, so that schedules count applied steps. Then the policy
    moves the scale. No value is read on the host.

    Unscaling and clipping are factors inside the inner update, not separate passes:
    with `max_norm` the kernels take less time than with `optax.clip_by_global_norm`
    and no scaling, benchmarks/results/jax_update_h200.json.

    Parameters and gradients may be of any float dtype. The state of `inner` and the
    updates are f32 at least; `optax.apply_updates` casts them to the parameters'.

    Args:
        inner: Any optax optimizer. With `MultiSteps` as `inner` every micro-batch is
            judged by itself; to judge the sum of several, use
            `gradscale.jax.MultiSteps` around `loss_scaled` (optax's own never clears
            an overflow).
        policy: `DynamicScale(...)`, `StaticScale(...)` or `NoScale()`.
        axis_name: Axes of pmap or shard_map over which all devices must agree. See
            `observe` for the norm.
        mask: True for scaled gradients, False for leaves that are passed to `inner`
            unchanged, such as fp8 scales; a tree, a prefix of it, or a function.
        max_norm: Clip the unscaled gradients to this norm.

    Returns:
        A `GradientTransformationExtraArgs`. Pass `value=loss` to its `update`, so
        that `last(opt_state).verdict` distinguishes a loss that is not finite from a
        scale that is too high.

    Raises:
        ConfigError: `policy` is not a policy that JAX can use, or `max_norm` is not a
            positive number.

    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import current_scale, last, scaled_value_and_grad
    >>> optimizer = loss_scaled(optax.sgd(0.1), DynamicScale(init_scale=1024.0))
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> state = optimizer.init(params)
    >>> loss_of = lambda params: (params["w"] ** 2).sum()
    >>> loss, grads = scaled_value_and_grad(loss_of)(state, params)
    >>> updates, state = optimizer.update(grads, state, params)
    >>> optax.apply_updates(params, updates)["w"].tolist()
    [0.800000011920929, 1.600000023841858]
    >>> bool(last(state).applied), int(state.applied_steps)
    (True, 1)
    """
    check_policy(policy)
    _check(max_norm)
    inner = optax.with_extra_args_support(inner)
    scales = (policy.min_scale, policy.max_scale) != (1.0, 1.0)

    def init(params: Any) -> LossScaledState:
        leaves = len(jax.tree.leaves(params))
        return first_state(policy, leaves, inner.init(_widened(params)))

    def step(
        grads: Any, state: LossScaledState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, LossScaledState]:
        if scales:
            warn_if_unscaled()
        leaves, flags, structure = gradients_in(grads, mask)
        same_places(grads, params)
        _check_number(len(leaves), state)
        inverse = 1.0 / state.rule.scale
        finite, amax, norm, peaks = read(leaves, flags, inverse, axes_of(axis_name))
        norm_finite = jnp.isfinite(norm) | (max_norm is None)
        applied = finite & norm_finite
        # Zeros if the step is skipped: inner never computes with inf or NaN, and
        # derivatives through a skipped step stay finite.
        kept = [
            jnp.where(applied, leaf, jnp.zeros_like(leaf)) if flag else leaf
            for leaf, flag in zip(leaves, flags, strict=True)
        ]
        factors = [inverse, *_clip(jnp.where(applied, norm, 0.0), max_norm)]
        unscaled = jax.tree.unflatten(structure, multiplied(kept, flags, *factors))
        updates, moved = inner.update(
            unscaled, state.inner, _widened(params), **extra_args
        )
        updates = jax.tree.map(lambda u: jnp.where(applied, u, 0), updates)
        before = state.last
        seen = LastStep(
            step=before.step + 1,
            scale=state.rule.scale,
            applied=applied,
            finite=finite,
            loss_finite=all_agree(_finite_loss(extra_args.get("value")), axis_name),
            norm_finite=norm_finite,
            calibrated=state.applied_steps > 0,
            grown=(state.rule.scale > before.scale) & (before.step > 0),
            floor_steps=_floor_steps(policy, state, applied),
            amax=amax,
            grad_norm=norm,
            peaks=peaks,
        )
        inner_state = select(applied, moved, state.inner)
        return updates, _advanced(policy, state, seen, inner_state)

    return optax.GradientTransformationExtraArgs(init, step)


def _advanced(
    policy: Policy, state: LossScaledState, seen: LastStep, inner: Any
) -> LossScaledState:
    """Return the state after a step, the scale moved and the step counted."""
    observed = Observed(seen.applied, seen.amax, seen.loss_finite)
    applied = seen.applied.astype(jnp.int32)
    before = state.counted
    counts = Counts(
        applied=before.applied + applied,
        skipped=before.skipped + 1 - applied,
        retried=before.retried,
        at_floor=seen.floor_steps,
    )
    return LossScaledState(
        rule=update(policy, state.rule, observed),
        counts=jnp.stack(counts),
        facts=packed(seen),
        inner=inner,
    )


def _finite_loss(value: Any) -> jax.Array:
    """Return bool[]: the loss is finite, or was not passed."""
    return jnp.isfinite(0.0 if value is None else value).all()


def _widened(params: Any) -> Any:
    """Return parameters in f32 at least: the inner state then keeps its dtypes."""

    def widen(leaf: Any) -> Any:
        return (
            wide(leaf) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) else leaf
        )

    return jax.tree.map(widen, params)


def _clip(norm: jax.Array, max_norm: float | None) -> list[jax.Array]:
    """Return the factor that clips the norm to `max_norm`; empty without `max_norm`."""
    if max_norm is None:
        return []
    # As in optax; torch adds 1e-6 to the norm. Exactly 1 up to max_norm, and with a
    # derivative even where the norm is 0.
    return [max_norm / jnp.maximum(norm, max_norm)]


def _floor_steps(
    policy: Policy, state: LossScaledState, applied: jax.Array
) -> jax.Array:
    """Return how many steps in a row were skipped at the lowest scale."""
    # A scale that cannot move has no floor to fall to.
    if policy.min_scale == policy.max_scale:
        return state.last.floor_steps
    stuck = ~applied & (state.rule.scale <= policy.min_scale)
    return jnp.where(stuck, state.last.floor_steps + 1, 0)


def _check_number(leaves: int, state: LossScaledState) -> None:
    expected = state.last.peaks.size
    if leaves != expected:
        raise GradientError(
            f"There are {leaves} gradients, and init() was given {expected} "
            "parameters. The optimizer would pair the wrong arrays. Pass the gradients "
            "of the tree that init() was called with.",
            code="GS106",
        )


def _check(max_norm: Any) -> None:
    number = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
    if max_norm is not None and not (number and SMALLEST <= f32(max_norm) < math.inf):
        raise ConfigError(
            f"max_norm={max_norm!r} is not a norm to clip to. Gradients are multiplied "
            "by max_norm / norm where that is below 1, so it must be a positive, "
            "normal f32. Pass 1.0, for instance, or None for no clipping.",
            code="GS101",
        )
