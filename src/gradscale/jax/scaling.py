"""Scale, unscale, and update of the policy's state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gradscale.core.policies import Policy
from gradscale.core.state import Observed, RuleOps
from gradscale.errors import GradientError
from gradscale.jax.grad_tree import Mask, gradients_in, wide
from gradscale.jax.reading import Reading
from gradscale.jax.state import scale_of

JAX = RuleOps(where=jnp.where)


def scale(loss: Any, state: Any) -> Any:
    """Multiply a loss, or a tree of losses, by the scale. In f32 at least.

    Args:
        loss: float[...] leaves. An f16 loss cannot hold a scale above 2^15: return an
            f32 loss from the model, as `Precision(...).cast_to_output` does.
        state: A policy's state, the state of an optimizer with `loss_scaled` in it,
            or a number.

    Raises:
        GradientError: The loss is an integer.

    >>> float(scale(jnp.float16(3.0), 65536.0))
    196608.0
    """
    factor = scale_of(state)
    for leaf in jax.tree.leaves(loss):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise GradientError(
                f"The loss is {jnp.result_type(leaf)}. It carries no derivative, so "
                "every gradient would be 0. Return a floating-point loss.",
                code="GS106",
            )
    return jax.tree.map(lambda leaf: wide(leaf) * factor, loss)


def unscale(grads: Any, state: Any, *, mask: Mask = None) -> Any:
    """Divide gradients by the scale that multiplied the loss, in f32 at least.

    The cast comes first, so that no element underflows: values of f16 are preserved,
    exactly if the scale is a power of two.

    Args:
        grads: A tree of floats; None in it marks parts that are not trained.
        state: The holder of the scale that multiplied the loss.
        mask: True for scaled gradients; leaves where it is False are returned
            unchanged.

    Raises:
        GradientError: A leaf is an integer or float0.

    >>> float(unscale(jnp.float16(2.0), 65536.0)) == 2.0**-15
    True
    """
    leaves, flags, structure = gradients_in(grads, mask)
    inverse = 1.0 / scale_of(state)
    return jax.tree.unflatten(structure, multiplied(leaves, flags, inverse))


def multiplied(leaves: list[Any], flags: list[bool], *factors: jax.Array) -> list[Any]:
    """Return the flagged leaves, in f32 at least, times each factor in turn."""
    out = list(leaves)
    for place, leaf in enumerate(leaves):
        if flags[place]:
            out[place] = wide(leaf)
            for factor in factors:
                out[place] = out[place] * factor
    return out


def update(policy: Policy, state: Any, seen: Reading | Observed | Any) -> Any:
    """Return the policy's state after one step.

    Args:
        policy: Its rule moves the state.
        state: The result of `init(policy)` or of an earlier call.
        seen: The result of `observe`, an `Observed`, or bool[]: all were finite.

    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import init
    >>> policy = DynamicScale(init_scale=8.0, growth_interval=1)
    >>> float(update(policy, init(policy), True).scale)
    16.0
    """
    if isinstance(seen, Reading):
        seen = seen.observed()
    if not isinstance(seen, Observed):
        seen = Observed(jnp.asarray(seen), jnp.float32(0.0), jnp.asarray(True))
    return policy.next_state(state, seen, JAX.where)


def select(applied: Any, new: Any, old: Any) -> Any:
    """Return the new tree if the step is applied, else the old one, in its dtypes.

    >>> select(jnp.array(False), {"w": jnp.ones(1)}, {"w": jnp.zeros(1)})["w"].item()
    0.0
    """
    return jax.tree.map(functools.partial(_selected, applied), new, old)


def _selected(applied: Any, new: Any, old: Any) -> Any:
    new, old = jnp.asarray(new), jnp.asarray(old)
    # No cast where none is needed: PRNG keys have no other dtype.
    return jnp.where(
        applied, new if new.dtype == old.dtype else new.astype(old.dtype), old
    )
