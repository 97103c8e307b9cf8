"""A drop-in for flax's dynamic scale: `from gradscale.jax.flax import DynamicScale`.

The class of `flax.training.dynamic_scale`, with these differences.

- The scale grows on the growth_interval-th finite step in a row, not on the next one.
- A scale that the loss's dtype cannot hold is lowered before it is used: an f16 loss
  does not waste its first step on 2^16.
- Growth ends at 2^126. Beyond, the inverse is not a normal f32, and a device that
  flushes such numbers would turn every gradient to 0.
- The loss is returned unscaled, and keyword arguments are passed to the function.
- A jitted step is traced once over a run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from gradscale.core import policies
from gradscale.core.state import Observed, ScaleState
from gradscale.jax.grad_tree import gradients_in, wide
from gradscale.jax.jmp import all_finite

__all__ = ["DynamicScale", "DynamicScaleResult"]


class DynamicScaleResult(NamedTuple):
    """The result of one step.

    Attributes:
        dynamic_scale: The `DynamicScale` for the next step.
        finite: bool[], every gradient element on every replica is finite.
        aux: The unscaled loss, or the pair of loss and auxiliary data.
        grad: The unscaled gradients, f32 or wider.
    """

    dynamic_scale: "DynamicScale"
    finite: Any
    aux: Any
    grad: Any


class DynamicScale(struct.PyTreeNode):
    """Grow after a quiet interval, back off when a gradient is not finite.

    The rule is that of `gradscale.DynamicScale`. The caller skips a step that is not
    finite: `jnp.where(finite, new, old)` over parameters and optimizer state.

    Attributes:
        growth_factor: Factor on the scale when it grows.
        backoff_factor: Factor on the scale when a gradient is not finite.
        growth_interval: Finite steps in a row after which the scale grows.
        fin_steps: i32[], finite steps in a row since the scale last moved; a leaf.
        scale: f32[] or wider, factor on the loss; a leaf.
        minimum_scale: The lowest scale; None means 2^-126.
        flax_count: Grow one finite step later, as flax does.

    >>> dynamic_scale = DynamicScale(growth_interval=2)
    >>> def loss_of(weight, batch):
    ...     return batch * weight
    >>> for _ in range(2):
    ...     step = dynamic_scale.value_and_grad(loss_of)
    ...     dynamic_scale, finite, loss, grad = step(jnp.float32(3.0), batch=2.0)
    ...     print(finite, loss, grad, dynamic_scale.scale)
    True 6.0 2.0 65536.0
    True 6.0 2.0 131072.0
    """

    growth_factor: float = struct.field(pytree_node=False, default=2.0)
    backoff_factor: float = struct.field(pytree_node=False, default=0.5)
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    fin_steps: Any = struct.field(default_factory=lambda: jnp.int32(0))
    scale: Any = struct.field(default_factory=lambda: jnp.float32(2.0**16))
    minimum_scale: float | None = struct.field(
        pytree_node=False, default=policies.LOWEST_SCALE
    )
    flax_count: bool = struct.field(pytree_node=False, default=False)

    def __post_init__(self) -> None:
        # Only a float: jax fills the leaves with other objects, such as axis numbers.
        if isinstance(self.scale, float):
            object.__setattr__(self, "scale", jnp.float32(self.scale))

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: str | None = None,
    ) -> Callable[..., DynamicScaleResult]:
        """Return a function that takes one step: `jax.value_and_grad`, scaled.

        Args:
            fun: Returns the loss, float[]; with has_aux, the loss and auxiliary data.
            argnums: Which positional arguments to differentiate with respect to.
            has_aux: `fun` returns a pair.
            axis_name: The axis of `pmap`, `vmap` or `shard_map` over which gradients
                are averaged before they are checked, so that replicas agree. With
                check_vma=True `shard_map` has summed them already: leave it out.

        Returns:
            A function of the arguments of `fun` that returns a `DynamicScaleResult`.
            It raises GradientError if a leaf to differentiate is not floating-point.
        """

        def loss_and_aux(*args: Any, **kwargs: Any) -> Any:
            given = fun(*args, **kwargs)
            return given if has_aux else (given, None)

        @functools.wraps(fun)
        def scaled_loss(*args: Any, **kwargs: Any) -> Any:
            loss, aux = loss_and_aux(*args, **kwargs)
            # The scale is f32: an f16 loss is multiplied in f32.
            return loss * self._scale_within(_ceiling(loss)), (loss, aux)

        differentiate = jax.value_and_grad(
            scaled_loss, argnums, has_aux=True, allow_int=True
        )

        def step(*args: Any, **kwargs: Any) -> DynamicScaleResult:
            (_, (loss, aux)), grad = differentiate(*args, **kwargs)
            ceiling = _ceiling(loss)
            scale = self._scale_within(ceiling)
            leaves, _, structure = gradients_in(grad)
            grad = jax.tree.unflatten(structure, [wide(g) / scale for g in leaves])
            if axis_name is not None:
                grad = jax.lax.pmean(grad, axis_name)
            finite = all_finite(grad)
            value = (loss, aux) if has_aux else loss
            return DynamicScaleResult(
                self._moved(scale, ceiling, finite), finite, value, grad
            )

        return step

    def _scale_within(self, ceiling: float) -> jax.Array:
        """Return the scale that is used, strongly typed, so that f16 becomes f32."""
        dtype = jnp.result_type(self.scale, jnp.float32)
        return jnp.minimum(jnp.asarray(self.scale, dtype), ceiling)

    def _moved(self, scale: Any, ceiling: float, finite: Any) -> "DynamicScale":
        policy = policies.DynamicScale.unchecked(
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval + self.flax_count,
            min_scale=max(self.minimum_scale or 0.0, policies.LOWEST_SCALE),
            max_scale=ceiling,
        )
        moved = policy.next_state(
            ScaleState(scale, jnp.asarray(self.fin_steps, jnp.int32)),
            # The rule uses nothing else.
            Observed(finite, amax=None, loss_finite=None),
            jnp.where,
        )
        return self.replace(fin_steps=moved.finite_steps, scale=moved.scale)


def _ceiling(loss: Any) -> float:
    """Return the largest power of two that the loss's dtype holds, 2^126 at most.

    Backward starts from the scale in that dtype, so it has to fit: 2^15 for f16.
    """
    largest = 2.0 ** (jnp.finfo(jnp.result_type(loss)).maxexp - 1)
    return min(largest, policies.DynamicScale.max_scale)
