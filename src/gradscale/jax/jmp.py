"""A drop-in for jmp 0.0.4: `import gradscale.jax.jmp as jmp`.

Every public name of jmp with its arguments and results, with these differences.

- The floor of `DynamicLossScale` holds under `jit` too.
- A scale is a strong f32 or wider: unscaled f16 gradients are f32 and do not underflow.
- Halving stops at 2^-126 and growth at 2^126. Beyond, the scale or its inverse is not a
  normal f32, and a device that flushes such numbers would turn every gradient to 0.
- A flag may be a Python bool, and the two sides of `select_tree` may differ in dtype.
"""

import warnings
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.core.policies import LOWEST_SCALE, DynamicScale
from gradscale.core.state import Observed, ScaleState
from gradscale.errors import ConfigError, GradscaleWarning
from gradscale.jax.jmp_policy import (
    Policy,
    cast_to_full,
    cast_to_half,
    dtype_to_names,
    get_policy,
    half_dtype,
)
from gradscale.jax.names import path_name

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "dtype_to_names",
    "get_policy",
    "half_dtype",
    "select_tree",
]


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoOpLossScale:
    """Do not scale the loss and the gradients. A tree without leaves."""

    @property
    def loss_scale(self) -> int:
        return 1

    def scale(self, tree: Any) -> Any:
        """Return the same tree."""
        return tree

    def unscale(self, tree: Any) -> Any:
        """Return the same tree."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Return the same loss scale."""
        return self


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticLossScale:
    """Keep one scale for the whole run. A tree without leaves.

    >>> StaticLossScale(1024).scale(jnp.float16(3.0))
    Array(3072., dtype=float32)
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        vars(self).update(loss_scale=_plain(self.loss_scale))

    def scale(self, tree: Any) -> Any:
        """Multiply every leaf by the scale; f16 becomes f32."""
        return _scaled(tree, _strong(self.loss_scale))

    def unscale(self, tree: Any) -> Any:
        """Multiply every leaf by the inverse of the scale; f16 becomes f32."""
        return _scaled(tree, 1 / _strong(self.loss_scale))

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Return the same loss scale."""
        return self


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class DynamicLossScale:
    """Grow after a quiet period, back off when a gradient is not finite.

    Finite: on every period-th such step in a row, the scale is multiplied by factor.
    Not finite: it is divided by factor, to min_loss_scale at least, and the count
    restarts. The rule is that of `gradscale.DynamicScale`.

    Attributes:
        loss_scale: f32[] or wider, factor on the loss; a leaf.
        counter: i32[], finite steps in a row since the scale last moved; a leaf.
        period: Finite steps in a row after which the scale grows.
        factor: The factor of growth, and of backing off.
        min_loss_scale: The lowest scale. Part of the tree's structure, as are
            period and factor.

    >>> loss_scale = DynamicLossScale(2.0**15, period=2)
    >>> for grads_finite in (True, True, False, False):
    ...     loss_scale = loss_scale.adjust(grads_finite)
    ...     print(loss_scale.loss_scale)
    32768.0
    65536.0
    32768.0
    16384.0
    """

    loss_scale: Any
    counter: Any = field(default_factory=lambda: jnp.int32(0))
    period: Any = 2000
    factor: Any = 2
    min_loss_scale: Any = 1.0

    def __post_init__(self) -> None:
        _warn_unless_float("loss_scale", self.loss_scale)
        _warn_unless_float("min_loss_scale", self.min_loss_scale)
        vars(self).update(
            loss_scale=_strong(self.loss_scale),
            counter=jnp.asarray(self.counter, jnp.int32),
            period=_plain(self.period),
            factor=_plain(self.factor),
            min_loss_scale=_plain(self.min_loss_scale),
        )

    def scale(self, tree: Any) -> Any:
        """Multiply every leaf by the scale; f16 becomes f32."""
        return _scaled(tree, _strong(self.loss_scale))

    def unscale(self, tree: Any) -> Any:
        """Multiply every leaf by the inverse of the scale; f16 becomes f32."""
        return _scaled(tree, 1 / _strong(self.loss_scale))

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Return the loss scale after one step.

        Args:
            grads_finite: bool[], every gradient element is finite.

        Raises:
            ConfigError: The flag is not a scalar.
        """
        finite = _flag(grads_finite, kinds="bi", jmp_text="Expected boolean scalar")
        scale = _strong(self.loss_scale)
        # Only a scale that was given as 0 may be 0.
        lowest = jnp.maximum(self.min_loss_scale, jnp.minimum(scale, LOWEST_SCALE))
        policy = DynamicScale.unchecked(
            growth_factor=self.factor,
            backoff_factor=1 / self.factor,
            growth_interval=self.period,
            # As in jmp, a scale that was given below its floor is left there.
            min_scale=jnp.where(finite, -jnp.inf, lowest),
        )
        moved = policy.next_state(
            ScaleState(scale, jnp.asarray(self.counter, jnp.int32)),
            # The rule uses nothing else.
            Observed(finite, amax=None, loss_finite=None),
            jnp.where,
        )
        leaves = (moved.scale, moved.finite_steps)
        return self.tree_unflatten(self._structure, leaves)

    @property
    def _structure(self) -> tuple[Any, ...]:
        return self.period, self.factor, self.min_loss_scale

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return `(loss_scale, counter)` and `(period, factor, min_loss_scale)`."""
        if isinstance(self.min_loss_scale, jax.core.Tracer):
            raise ConfigError(
                f"min_loss_scale={self.min_loss_scale} is a traced value. It belongs "
                "to the structure of the tree, and a structure cannot leave the "
                "function that is traced with a value that is not known yet. Pass a "
                "Python float.",
                code="GS101",
            )
        return (self.loss_scale, self.counter), self._structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Any) -> "DynamicLossScale":
        """Return a loss scale with these leaves, of any type."""
        # Not through __init__: jax also uses leaves that are not numbers.
        made = cls.__new__(cls)
        names = [each.name for each in fields(cls)]
        vars(made).update(zip(names, (*leaves, *structure), strict=True))
        return made


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def all_finite(tree: Any) -> jax.Array:
    """Return bool[], True if every element of every leaf is finite.

    >>> all_finite({"w": jnp.array([1.0, jnp.inf])}), all_finite({})
    (Array(False, dtype=bool), Array(True, dtype=bool))
    """
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.stack([jnp.array(True), *finite]).all()


def select_tree(pred: Any, a: Any, b: Any) -> Any:
    """Return `a` where `pred` is True, else `b`; both are trees of the same structure.

    Args:
        pred: bool[].
        a: Leaves of any dtype.
        b: Leaves of the same shapes. Where dtypes differ, both become the wider one.

    Raises:
        ConfigError: The flag is not a boolean scalar, or two leaves differ in shape.

    >>> select_tree(True, {"w": jnp.float16(1.0)}, {"w": jnp.float32(2.0)})
    {'w': Array(1., dtype=float32)}
    """
    flag = _flag(pred, kinds="b", jmp_text="expected boolean scalar")

    def select(path: Any, yes: Any, no: Any) -> jax.Array:
        if jnp.shape(yes) != jnp.shape(no):
            raise ConfigError(
                f"{path_name(path)} has shape {jnp.shape(yes)} on one side and "
                f"{jnp.shape(no)} on the other. Broadcasting would "
                "change one of them. Pass two trees whose leaves have the same shapes.",
                code="GS101",
            )
        return jnp.where(flag, yes, no)

    return jax.tree_util.tree_map_with_path(select, a, b)


def _strong(value: Any) -> jax.Array:
    """Return f32 or wider, strongly typed: it widens f16, and a step is traced once."""
    return jnp.asarray(value, jnp.result_type(value, jnp.float32))


def _plain(value: Any) -> Any:
    """Return a hashable Python number; a traced value is returned unchanged."""
    traced = isinstance(value, jax.core.Tracer)
    return value if traced else np.asarray(value).item()


def _scaled(tree: Any, factor: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: leaf * factor, tree)


def _flag(value: Any, *, kinds: str, jmp_text: str) -> jax.Array:
    """Return bool[]; `kinds` are the dtype kinds that jmp takes for a flag."""
    flag = jnp.asarray(value)
    if flag.ndim != 0 or flag.dtype.kind not in kinds:
        raise ConfigError(
            f"The flag is {flag.dtype}{list(flag.shape)}. One flag decides for all "
            "leaves, so it must be one truth value. Pass the result of all_finite().",
            code="GS101",
            replaces=jmp_text,
        )
    return flag.astype(bool)


def _warn_unless_float(name: str, value: Any) -> None:
    dtype = jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(
            GradscaleWarning(
                f"Expected floating type for {name}, got {dtype}. It is taken as a "
                "float. Pass a float.",
                code="GS101",
            ),
            stacklevel=4,
        )
