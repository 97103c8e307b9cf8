"""The gradients among the leaves of a tree."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from gradscale.errors import ConfigError, GradientError
from gradscale.jax.names import path_name

# A tree of bools, a prefix of one, or a function of the gradients that returns either.
Mask = Any | Callable[[Any], Any] | None


def wide(leaf: ArrayLike) -> jax.Array:
    """Cast narrower floats to f32; f64 and complex numbers are returned unchanged."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return leaf
    return leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf


def chosen(tree: Any, mask: Mask) -> list[bool]:
    """Return a flag for each leaf in the order of `jax.tree.leaves`: the mask is True.

    Raises:
        ConfigError: The mask does not fit the tree.

    >>> chosen({"amax": 0.0, "w": [1.0, 2.0]}, {"amax": False, "w": True})
    [False, True, True]
    """
    if mask is None:
        return [True] * len(jax.tree.leaves(tree))
    # An equinox module is callable too, but it is not a leaf; a function is.
    makes = callable(mask) and jax.tree_util.all_leaves([mask])
    made = mask(tree) if makes else mask
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(made, tree))
    except ValueError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"mask does not fit the gradients: {reason}. It marks each leaf that is a "
            "scaled gradient, so it must have their structure, or a prefix of it. Pass "
            "a tree of True and False, or a function that returns one.",
            code="GS101",
        ) from error
    strange = [flag for flag in flags if not isinstance(flag, (bool, np.bool_))]
    if strange:
        raise ConfigError(
            f"mask has a leaf {strange[0]!r} of type {type(strange[0]).__name__}. The "
            "mask selects the code that is compiled, so it cannot be an array. Use "
            "True for a scaled gradient and False for any other leaf.",
            code="GS101",
        )
    return [bool(flag) for flag in flags]


def gradients_in(tree: Any, mask: Mask = None) -> tuple[list[Any], list[bool], Any]:
    """Return the leaves of a tree, which of them are scaled gradients, and its shape.

    None is not a leaf: it marks a part that is not trained, as in equinox.

    Raises:
        GradientError: A chosen leaf is not a floating-point array, or there is no leaf.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    flags = chosen(tree, mask)
    if not found and not jax.tree.leaves(tree, is_leaf=_is_placeholder):
        raise GradientError(
            f"There is no gradient in {tree!r}. A step without gradients can neither "
            "be checked nor taken. Pass the gradients that jax.grad returned.",
            code="GS103",
        )
    for (path, leaf), flag in zip(found, flags, strict=True):
        if flag:
            _check(path, leaf)
    return [leaf for _, leaf in found], flags, structure


def same_places(grads: Any, params: Any) -> None:
    """Raise unless gradients and parameters have the same paths.

    Raises:
        GradientError: A parameter has no gradient, or a gradient has no parameter.
    """
    if params is None:
        return
    here = dict.fromkeys(map(path_name, _paths(grads)))
    there = dict.fromkeys(map(path_name, _paths(params)))
    missing = [name for name in there if name not in here]
    extra = [name for name in here if name not in there]
    if not missing and not extra:
        return
    raise GradientError(
        "Gradients and parameters do not belong together: "
        + (
            f"{missing[0]} has no gradient"
            if missing
            else f"{extra[0]} is no parameter"
        )
        + f" ({len(missing) + len(extra)} such leaves). The optimizer would pair the "
        "wrong arrays. Differentiate with respect to the same tree that is passed as "
        "params; a None in one must be in both. Put a wrapper that keeps parameters in "
        "pairs, such as optax.lookahead, around loss_scaled, not inside.",
        code="GS106",
    )


def _paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _is_placeholder(node: Any) -> bool:
    """Return True for an empty node that replaces a leaf."""
    # optax.MaskedNode. By name: this file must work without optax.
    return type(node).__name__ == "MaskedNode"


def _check(path: Any, leaf: Any) -> None:
    dtype = jnp.result_type(leaf) if _is_number(leaf) else getattr(leaf, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
        return
    kind = "float0" if dtype == jax.dtypes.float0 else dtype or type(leaf).__name__
    raise GradientError(
        f"The gradient of {path_name(path)} is {kind}. It carries no derivative, so it "
        "can neither be unscaled nor be checked. Do not differentiate with respect to "
        "this leaf, for instance with eqx.filter(model, eqx.is_inexact_array), or pass "
        "a mask that is False for it.",
        code="GS106",
    )


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex))
