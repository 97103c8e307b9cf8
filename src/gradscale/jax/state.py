"""The state of `loss_scaled`, and functions that find it in an optimizer state."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.core.policies import Policy
from gradscale.core.records import Verdict
from gradscale.core.state import FixedState, ScaleState
from gradscale.errors import (
    ConfigError,
    GradscaleWarning,
    ScaleCollapsed,
    StateError,
)
from gradscale.jax.last_step import Counts, LastStep, before_the_first, packed, unpacked

# The inverse of a larger scale is subnormal, and XLA flushes subnormals on the CPU.
HIGHEST_SCALE = 2.0**126
# The scale of an optimizer was requested in this process, or its absence reported.
_scale_requested = False


class LossScaledState(NamedTuple):
    """The state of `loss_scaled`: arrays only, and those of the wrapped transform.

    Few arrays, because each costs the host some microseconds a step.

    Attributes:
        rule: The policy's state; its first field is the scale for the next loss.
        counts: i32[4], the fields of `Counts`.
        facts: f32[9 + n], the facts of the last step; read them through `last`.
        inner: The state of the wrapped transform, as of the last applied step.
    """

    rule: FixedState | ScaleState
    counts: jax.Array
    facts: jax.Array
    inner: Any

    @property
    def counted(self) -> Counts:
        """The counts by name."""
        return _counts(_array(self.counts))

    @property
    def applied_steps(self) -> jax.Array:
        """i32[], steps taken."""
        return self.counted.applied

    @property
    def skipped_steps(self) -> jax.Array:
        """i32[], steps skipped because a value was not finite."""
        return self.counted.skipped

    @property
    def retried_steps(self) -> jax.Array:
        """i32[], attempts that were repeated at a lower scale."""
        return self.counted.retried

    @property
    def last(self) -> LastStep:
        """The outcome of the last step."""
        return _last(_array(self.facts), _array(self.counts))


def scale_of(carrier: Any) -> jax.Array:
    """Return f32[], the scale that a policy's state, a number or an optimizer holds."""
    if isinstance(carrier, (FixedState, ScaleState)):
        return _array(carrier.scale)
    if isinstance(carrier, (int, float, jax.Array, np.ndarray, np.generic)):
        return jnp.asarray(carrier, jnp.float32)
    return current_scale(carrier)


def current_scale(opt_state: Any) -> jax.Array:
    """Return f32[], the scale to multiply the next loss by. Never waits.

    Args:
        opt_state: The state of an optimizer with one `loss_scaled` in it, however
            deeply wrapped, or an `nnx.Optimizer`.

    Raises:
        StateError: There is no `loss_scaled` in it, or more than one.

    >>> import optax
    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import loss_scaled
    >>> optimizer = optax.chain(loss_scaled(optax.sgd(0.1), DynamicScale()))
    >>> float(current_scale(optimizer.init(jnp.ones(2))))
    65536.0
    """
    global _scale_requested
    _scale_requested = True
    return _array(only_state(opt_state).rule.scale)


def warn_if_unscaled() -> None:
    """Warn, once in a process, if no loss can have been scaled.

    Runs where `update` is called or traced, and adds nothing to a compiled step.
    """
    global _scale_requested
    if _scale_requested:
        return
    _scale_requested = True
    warnings.warn(
        GradscaleWarning(
            "update() of loss_scaled was called before the scale was requested. It "
            "divides the gradients by the scale, so those of an unscaled loss become "
            "too small by that factor. Take the gradients with "
            "scaled_value_and_grad(loss)(opt_state, params) instead of "
            "jax.value_and_grad, or multiply the loss by current_scale(opt_state).",
            code="GS114",
        ),
        stacklevel=3,
    )


def last(opt_state: Any) -> LastStep:
    """Return the outcome of the last step. Never waits; reading a field may.

    Raises:
        StateError: There is no `loss_scaled` in the state, or more than one.

    >>> import optax
    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import loss_scaled, scaled_value_and_grad
    >>> optimizer = loss_scaled(optax.sgd(0.1), DynamicScale())
    >>> params = jnp.ones(2)
    >>> state = optimizer.init(params)
    >>> _, grads = scaled_value_and_grad(lambda w: (w / 0.0).sum())(state, params)
    >>> _, state = optimizer.update(grads, state)
    >>> bool(last(state).applied), str(last(state).verdict)
    (False, 'calibrating')
    """
    return only_state(opt_state).last


def counts(opt_state: Any) -> Counts:
    """Return the counts of applied, skipped and retried steps. Never waits.

    Raises:
        StateError: There is no `loss_scaled` in the state, or more than one.

    >>> import optax
    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import loss_scaled, scaled_value_and_grad
    >>> optimizer = loss_scaled(optax.sgd(0.1), DynamicScale())
    >>> params = jnp.ones(2)
    >>> state = optimizer.init(params)
    >>> _, grads = scaled_value_and_grad(lambda w: w.sum())(state, params)
    >>> _, state = optimizer.update(grads, state)
    >>> int(counts(state).applied), int(counts(state).skipped)
    (1, 0)
    """
    return only_state(opt_state).counted


def raise_if_collapsed(opt_state: Any) -> None:
    """Raise if the scale is at its floor and steps are still skipped. Waits.

    Raises:
        ScaleCollapsed: Three steps in a row were not finite at the lowest scale.
        StateError: There is no `loss_scaled` in the state, or more than one.

    >>> import optax
    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import loss_scaled, scaled_value_and_grad
    >>> policy = DynamicScale(init_scale=1.0, min_scale=1.0)
    >>> optimizer = loss_scaled(optax.sgd(0.1), policy)
    >>> params = jnp.ones(2)
    >>> state = optimizer.init(params)
    >>> loss_and_grads = scaled_value_and_grad(lambda w: (w / 0.0).sum())
    >>> for _ in range(3):
    ...     _, grads = loss_and_grads(state, params)
    ...     _, state = optimizer.update(grads, state)
    >>> raise_if_collapsed(state)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    gradscale.errors.ScaleCollapsed: The scale has fallen to its floor of 1 ...
    """
    step = last(opt_state)
    if step.verdict is Verdict.COLLAPSE:
        record = step.record
        raise ScaleCollapsed(
            f"The scale has fallen to its floor of {record.scale:g} and the gradients "
            f"were still not finite, {record.floor_steps} steps in a row up to step "
            f"{record.step}. A lower scale cannot help: the cause is in the model, "
            "the data or the loss. Check culprits(last(opt_state), params); the "
            "weights are those of the last applied step.",
            code="GS202",
        )


def only_state(tree: Any) -> LossScaledState:
    """Return the one `LossScaledState` in a tree.

    Raises:
        StateError: There is none, or more than one.
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_state)
    found = [leaf for leaf in leaves if _is_state(leaf)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise StateError(
            f"There is no state of loss_scaled in this {type(tree).__name__}. The "
            "scale lives in the state of the optimizer that loss_scaled returned. "
            "Pass the result of its init() or update(); a checkpoint must be restored "
            "into such a state, not into plain dicts.",
            code="GS302",
        )
    raise StateError(
        f"There are {len(found)} states of loss_scaled in this {type(tree).__name__}. "
        "Each has a scale of its own, and one loss cannot be multiplied by all of "
        "them. Put a single loss_scaled around multi_transform or chain, or pass one "
        "part of the state.",
        code="GS302",
    )


def replaced(tree: Any, state: LossScaledState) -> Any:
    """Return the tree with its one `LossScaledState` replaced."""
    only_state(tree)
    return jax.tree.map(
        lambda leaf: state if _is_state(leaf) else leaf, tree, is_leaf=_is_state
    )


def _is_state(node: Any) -> bool:
    return isinstance(node, LossScaledState)


# Compiled: outside jit one dispatch, not one for each field.
@functools.partial(jax.jit, inline=True)
def _counts(counts: jax.Array) -> Counts:
    return Counts(*jnp.moveaxis(counts, -1, 0))


@functools.partial(jax.jit, inline=True)
def _last(facts: jax.Array, counts: jax.Array) -> LastStep:
    return unpacked(facts, _counts(counts))


def _array(value: Any) -> jax.Array:
    """Return an array without the wrapper of flax nnx or of a checkpoint."""
    return jnp.asarray(value)


def first_state(policy: Policy, leaves: int, inner: Any) -> LossScaledState:
    """Return the state before the first step, every array a buffer of its own."""
    return LossScaledState(
        rule=init(policy),
        counts=jnp.zeros(len(Counts._fields), jnp.int32),
        facts=packed(before_the_first(leaves)),
        inner=inner,
    )


def init(policy: Policy) -> Any:
    """Return a policy's first state as strongly typed arrays: f32[] and i32[].

    Raises:
        ConfigError: It is not a policy, or allows a scale whose inverse XLA flushes to
            zero.

    >>> from gradscale import DynamicScale
    >>> init(DynamicScale()).scale.dtype.name
    'float32'
    """
    check_policy(policy)
    first = policy.init_state()
    return type(first)(
        *(
            jnp.array(value, jnp.float32 if isinstance(value, float) else jnp.int32)
            for value in first
        )
    )


def check_policy(policy: Any) -> None:
    """Raise for a policy that JAX cannot use.

    Raises:
        ConfigError: It is not a policy, or allows a scale whose inverse XLA flushes to
            zero.
    """
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise ConfigError(
            f"policy={policy!r} is a {type(policy).__name__}. Loss scaling needs "
            "settings and a rule. Pass DynamicScale(), StaticScale(scale=...) or "
            "NoScale().",
            code="GS101",
        )
    if policy.max_scale > HIGHEST_SCALE:
        raise ConfigError(
            f"max_scale={policy.max_scale:g} is above {HIGHEST_SCALE:g}, which is "
            "2^126. XLA multiplies by the inverse of the scale and flushes numbers "
            "below 2^-126 to zero, so every gradient would become 0. Pass a lower "
            "max_scale, or a lower scale to StaticScale.",
            code="GS101",
        )
