"""Dtypes by name, and casts of whole trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.errors import ConfigError

# The first name of each is printed.
DTYPE_NAMES: dict[Any, tuple[str, ...]] = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("f32", "full", "float32"),
    jnp.float64: ("f64", "float64"),
}
_BY_NAME = {name: dtype for dtype, names in DTYPE_NAMES.items() for name in names}


def half_dtype() -> Any:
    """Return the half-precision dtype that the default device supports best."""
    on_tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.bfloat16 if on_tpu else jnp.float16


def parse_dtype(name: str) -> Any:
    """Return the dtype that a name such as "f16", "bfloat16" or "half" stands for.

    Raises:
        ConfigError: There is no such name.

    >>> parse_dtype("bf16") is jnp.bfloat16
    True
    """
    if name == "half":
        return half_dtype()
    if name not in _BY_NAME:
        known = ", ".join([*_BY_NAME, "half"])
        raise ConfigError(
            f"{name!r} is not the name of a dtype. Only floating-point dtypes can be "
            f"cast to and back. Pass one of {known}.",
            code="GS101",
        )
    return _BY_NAME[name]


def is_float_array(leaf: Any) -> bool:
    """Return True for an array of real floating-point numbers, traced or not."""
    return isinstance(leaf, (np.ndarray, jax.Array)) and jnp.issubdtype(
        leaf.dtype, jnp.floating
    )


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point arrays of a tree; all other leaves are unchanged.

    >>> cast_floats({"w": jnp.ones(2), "step": 3}, jnp.float16)["w"].dtype.name
    'float16'
    """
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if is_float_array(leaf) else leaf, tree
    )
