"""Gradients of a scaled loss."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gradscale.core.state import FixedState, ScaleState
from gradscale.errors import OrderError
from gradscale.jax.grad_tree import Mask
from gradscale.jax.scaling import scale, unscale
from gradscale.jax.state import scale_of

Differentiate = Callable[..., Callable[..., Any]]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    mask: Mask = None,
    using: Differentiate = jax.value_and_grad,
) -> Callable[..., Any]:
    """Return a function that gives the loss and the unscaled gradients.

    The loss is scaled before it is differentiated, and the gradients are cast to f32
    before they are divided, so that no element underflows. The loss is returned
    unscaled. For an optimizer made with `loss_scaled`, which does its own unscaling,
    use `scaled_value_and_grad`.

    Args:
        fun: Returns the loss, or the loss and auxiliary data if `has_aux`.
        argnums: Which positional arguments to differentiate with respect to.
        has_aux: `fun` returns a pair.
        mask: True for scaled gradients; see `unscale`.
        using: The function that differentiates: `jax.value_and_grad`,
            `nnx.value_and_grad` or `eqx.filter_value_and_grad`.

    Returns:
        A function of a policy's state, then the arguments of `fun`, by position or
        by keyword. Its results are those of `jax.value_and_grad(fun)`.

    >>> import jax.numpy as jnp
    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import init
    >>> state = init(DynamicScale())
    >>> loss, grad = value_and_grad(lambda w, x: w * x)(state, 3.0, x=1e-7)
    >>> float(loss) == float(jnp.float32(3e-7)), float(grad) == float(jnp.float32(1e-7))
    (True, True)
    """
    scaled = scaled_value_and_grad(fun, argnums, has_aux, using=using)

    @functools.wraps(fun)
    def differentiated(state: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_bare(state)
        value, grads = scaled(state, *args, **kwargs)
        return value, unscale(grads, state, mask=mask)

    return with_own_signature(differentiated)


def scaled_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    using: Differentiate = jax.value_and_grad,
) -> Callable[..., Any]:
    """Return a function that gives the loss and the gradients of the scaled loss.

    The gradients are those that `update` of an optimizer made with `loss_scaled`
    expects. The loss is returned unscaled.

    Args:
        fun, argnums, has_aux, using: As in `value_and_grad`.

    Returns:
        A function of the holder of the scale (the state of the optimizer, a policy's
        state, a number), then the arguments of `fun`.

    >>> loss, grad = scaled_value_and_grad(lambda w: w * w)(8.0, 3.0)
    >>> float(loss), float(grad)
    (9.0, 48.0)
    """
    # Not every library's function has argnums.
    where = {} if argnums == 0 else {"argnums": argnums}

    @functools.wraps(fun)
    def differentiated(carrier: Any, /, *args: Any, **kwargs: Any) -> Any:
        factor = scale_of(carrier)

        # The loss is auxiliary data: dividing by the scale could round or overflow.
        def scaled_loss(*args: Any, **kwargs: Any) -> Any:
            value = fun(*args, **kwargs)
            return scale(value[0] if has_aux else value, factor), value

        (_, value), grads = using(scaled_loss, has_aux=True, **where)(*args, **kwargs)
        return value, grads

    return with_own_signature(differentiated)


def with_own_signature(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper without the signature of the wrapped function.

    It has one argument more, and `jax.jit` counts static_argnames by signature.
    """
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
    return wrapper


def _check_bare(state: Any) -> None:
    kinds = (FixedState, ScaleState, int, float, jax.Array, np.ndarray, np.generic)
    if not isinstance(state, kinds):
        raise OrderError(
            f"value_and_grad was given a {type(state).__name__} to take the scale "
            "from. It returns unscaled gradients, and the optimizer's update() would "
            "unscale them a second time. Use scaled_value_and_grad with the state of "
            "an optimizer, or pass the state that init(policy) returned.",
            code="GS102",
        )
