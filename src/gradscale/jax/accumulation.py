"""Gradient accumulation that recovers from an overflow."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


class MultiSteps(optax.MultiSteps):
    """`optax.MultiSteps` around `loss_scaled`: one decision for several micro-batches.

    Optax clears its accumulator by multiplying it with 0, so that one inf stays in it
    as NaN and every later step is skipped. This class sets it to zeros. All else is
    unchanged: arguments, state, `has_updated`.

    The scale moves once in `every_k_schedule` micro-batches, which are all multiplied
    by the same scale.

    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import loss_scaled
    >>> inner = loss_scaled(optax.sgd(0.5), DynamicScale(init_scale=2.0))
    >>> optimizer = MultiSteps(inner, every_k_schedule=2)
    >>> params = jnp.array(1.0)
    >>> state = optimizer.init(params)
    >>> for scaled_grad in (jnp.inf, 2.0, 1.0, 3.0):
    ...     grad = jnp.array(scaled_grad)
    ...     updates, state = optimizer.update(grad, state, params)
    ...     print(float(updates))
    0.0
    0.0
    0.0
    -1.0
    """

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """Take the gradients of one micro-batch; see `optax.MultiSteps.update`."""
        updates, moved = super().update(updates, state, params, **extra_args)
        empty = moved.mini_step == 0
        sums = jax.tree.map(lambda s: jnp.where(empty, 0, s), moved.acc_grads)
        return updates, moved._replace(acc_grads=sums)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return this as a transform that can be chained, extra arguments included."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)
