"""Retries a batch at a lower scale, inside the compiled function."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradscale.core.policies import Policy
from gradscale.core.state import FixedState, Observed, ScaleState
from gradscale.errors import ConfigError
from gradscale.jax.axes import AxisName, all_agree, blank_of
from gradscale.jax.differentiation import (
    Differentiate,
    scaled_value_and_grad,
    with_own_signature,
)
from gradscale.jax.grad_tree import Mask
from gradscale.jax.reading import observe
from gradscale.jax.scaling import update
from gradscale.jax.state import LossScaledState, only_state, replaced


class _Attempt(NamedTuple):
    """The carry of the loop.

    Attributes:
        number: i32[], attempts made.
        rule: The policy's state for the next attempt.
        again: bool[], another attempt follows.
        result: The loss and the scaled gradients of the last attempt.
    """

    number: jax.Array
    rule: Any
    again: jax.Array
    result: Any


def retried_value_and_grad(
    fun: Callable[..., Any],
    policy: Policy,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    retries: int = 4,
    axis_name: AxisName = None,
    mask: Mask = None,
    using: Differentiate = jax.value_and_grad,
) -> Callable[..., Any]:
    """Return a function that retries a batch at a lower scale if it overflows.

    In a `lax.while_loop`, so it works under `jit` and is traced once: the same
    arguments, PRNG keys included, give the same forward pass; only the scale differs.
    Each attempt that fails moves the policy's state as a skipped step does. The loop
    ends with the first finite attempt, when `retries` are used up, when the rule does
    not lower the scale (at its floor, a forgiven overflow, a fixed scale), or when
    the loss itself is not finite, where no scale can help.

    The last attempt is judged by `update`, as any other step.

    Args:
        fun, argnums, has_aux: As in `value_and_grad`.
        policy: Its rule lowers the scale.
        retries: The largest number of further attempts.
        axis_name: Axes over which all devices must agree to retry.
        mask: True for scaled gradients; see `observe`.
        using: `jax.value_and_grad` or `eqx.filter_value_and_grad`. An nnx
            module is changed in place, which a loop does not allow: pass the result of
            `nnx.split`, and merge it inside `fun`.

    Returns:
        A function of the state of an optimizer with `loss_scaled` in it, or of a
        policy's state, then the arguments of `fun`. It returns the unscaled loss,
        the scaled gradients, and the state, whose scale unscales them.

    Raises:
        ConfigError: `retries` is not a number of attempts.

    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import init
    >>> policy = DynamicScale(init_scale=2.0**17)
    >>> half = lambda w: (w.astype(jnp.float16) * jnp.float16(2.0)).astype(jnp.float32)
    >>> loss, grad, state = retried_value_and_grad(half, policy)(init(policy), 1.0)
    >>> float(grad / state.scale), float(state.scale)
    (2.0, 16384.0)
    """
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ConfigError(
            f"retries={retries!r} is not a number of attempts. The loop must end, and "
            "it is compiled with this bound. Pass a whole number, 0 or more.",
            code="GS101",
        )
    scaled = scaled_value_and_grad(fun, argnums, has_aux, using=using)

    @functools.wraps(fun)
    def differentiated(carrier: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_functional(args, kwargs)

        def attempt(made: _Attempt) -> _Attempt:
            value, grads = scaled(made.rule, *args, **kwargs)
            seen = observe(grads, made.rule, axis_name=axis_name, mask=mask)
            loss = value[0] if has_aux else value
            fits = all_agree(jnp.isfinite(loss).all(), axis_name)
            moved = update(policy, made.rule, Observed(seen.finite, seen.amax, fits))
            lower = moved.scale < made.rule.scale
            again = ~seen.finite & fits & lower & (made.number < retries)
            # `update` judges the last attempt: only attempts before it move the state.
            rule = jax.tree.map(functools.partial(jnp.where, again), moved, made.rule)
            return _Attempt(made.number + 1, rule, again, (value, grads))

        rule = rule_of(carrier)
        blank = blank_of(lambda: scaled(rule, *args, **kwargs))
        first = _Attempt(jnp.int32(0), rule, jnp.asarray(True), blank)
        done = lax.while_loop(lambda made: made.again, attempt, first)
        value, grads = done.result
        return value, grads, _with_rule(carrier, done.rule, done.number - 1)

    return with_own_signature(differentiated)


def rule_of(carrier: Any) -> Any:
    """Return the policy's state that a carrier is or holds."""
    if isinstance(carrier, (FixedState, ScaleState)):
        return carrier
    rule = only_state(carrier).rule
    # Bare arrays: an optimizer of nnx wraps those of its state.
    return type(rule)(*map(jnp.asarray, rule))


def _check_functional(args: Any, kwargs: Any) -> None:
    # Not imported: a module of a library exists only if the library is loaded.
    nnx = sys.modules.get("flax.nnx")
    for given in (*args, *kwargs.values()):
        if nnx is not None and isinstance(given, nnx.Module):
            raise ConfigError(
                f"retried_value_and_grad was given a {type(given).__name__}, which is "
                "a module of nnx. It would be changed in place inside a loop that may "
                "run several times. Pass the state that nnx.split(model) returned, and "
                "merge it inside the function.",
                code="GS101",
            )


def _with_rule(carrier: Any, rule: Any, retried: jax.Array) -> Any:
    """Return the carrier with another rule's state, and the attempts counted."""
    if isinstance(carrier, (FixedState, ScaleState)):
        return rule
    state: LossScaledState = only_state(carrier)
    counted = state.counted
    counts = jnp.stack(counted._replace(retried=counted.retried + retried))
    return replaced(
        carrier,
        state._replace(
            rule=_like(state.rule, rule), counts=_like(state.counts, counts)
        ),
    )


def _like(old: Any, new: Any) -> Any:
    """Return new arrays in the wrappers of the old ones."""
    return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))
