"""jmp's policy: the dtypes of parameters, computations and outputs.

A part of `gradscale.jax.jmp`, which is the module to import.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from gradscale.errors import ConfigError
from gradscale.jax.casting import DTYPE_NAMES, cast_floats, half_dtype, parse_dtype

__all__ = [
    "Policy",
    "cast_to_full",
    "cast_to_half",
    "dtype_to_names",
    "get_policy",
    "half_dtype",
]

# jmp prints "full" where gradscale prints "f32".
dtype_to_names = {**DTYPE_NAMES, jnp.float32: ("full", "f32", "float32")}


@dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, computations and outputs.

    >>> print(get_policy("params=f32,compute=f16").with_output_dtype(jnp.float32))
    p=full,c=f16,o=full
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def cast_to_param(self, x: Any) -> Any:
        """Cast the floating-point arrays of a tree to the dtype of parameters."""
        return cast_floats(x, self.param_dtype)

    def cast_to_compute(self, x: Any) -> Any:
        """Cast the floating-point arrays of a tree to the dtype of computations."""
        return cast_floats(x, self.compute_dtype)

    def cast_to_output(self, x: Any) -> Any:
        """Cast the floating-point arrays of a tree to the dtype of outputs."""
        return cast_floats(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Return the same policy with another dtype of outputs."""
        return replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        kinds = (self.param_dtype, self.compute_dtype, self.output_dtype)
        names = (dtype_to_names[jnp.dtype(kind).type][0] for kind in kinds)
        return "p={},c={},o={}".format(*names)


def get_policy(policy_name: str) -> Policy:
    """Return the policy that "f16", "c=f16" or "params=f32,compute=f16" describes.

    By default parameters are f32, computations have the dtype of parameters, and
    outputs that of computations. A single dtype is that of all three.

    Raises:
        ConfigError: There is no such part or no such dtype.
    """
    parts = policy_name if "=" in policy_name else f"p={policy_name}"
    dtypes = {"p": jnp.float32}
    for part in parts.split(","):
        key, _, name = part.partition("=")
        if key not in ("p", "params", "c", "compute", "o", "output"):
            raise ConfigError(
                f"{key!r} in {policy_name!r} is no part of a policy. Only parameters, "
                "computations and outputs have dtypes of their own. Write params, "
                "compute or output, or their first letters.",
                code="GS101",
                replaces=f"Unknown key '{key}' in '{policy_name}'",
            )
        dtypes[key[0]] = _named_dtype(name)
    compute = dtypes.get("c", dtypes["p"])
    return Policy(dtypes["p"], compute, dtypes.get("o", compute))


def cast_to_full(tree: Any) -> Any:
    """Cast the floating-point arrays of a tree to f32."""
    return cast_floats(tree, jnp.float32)


def cast_to_half(tree: Any) -> Any:
    """Cast the floating-point arrays of a tree to `half_dtype()`."""
    return cast_floats(tree, half_dtype())


def _named_dtype(name: str) -> Any:
    try:
        return parse_dtype(name)
    except ConfigError as error:
        raise ConfigError(
            f"{name!r} is not the name of a dtype. Every part of a policy is cast to "
            "a floating-point dtype. Pass full, half, f16, bf16, f32 or f64.",
            code="GS101",
            replaces=f"Unknown dtype '{name}'",
        ) from error
