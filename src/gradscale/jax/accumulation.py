"""Gradient accumulation that recovers from an overflow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradscale.errors import ConfigError


class MultiSteps(optax.MultiSteps):
    """`optax.MultiSteps` around `loss_scaled`: one decision for several micro-batches.

    Optax clears its accumulator by multiplying it with 0, so that one inf stays in it
    as NaN and every later step is skipped. This class sets it to zeros. State and
    `has_updated` are unchanged.

    The scale moves once in `every_k_schedule` micro-batches, which are all multiplied
    by the same scale.

    Args:
        opt: The result of `loss_scaled`, or a chain around it.
        every_k_schedule, use_grad_mean, **options: As in optax.
        should_skip_update_fn: Must be None. A micro-batch that optax skips never
            reaches `loss_scaled`: with `optax.skip_not_finite` a scale that is too high
            is never lowered, and `optax.skip_large_updates` compares the norm of scaled
            gradients.

    Raises:
        ConfigError: `should_skip_update_fn` was given.

    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import current_scale, loss_scaled
    >>> inner = loss_scaled(optax.sgd(0.5), DynamicScale(init_scale=2.0))
    >>> optimizer = MultiSteps(inner, every_k_schedule=2)
    >>> params = jnp.array(1.0)
    >>> state = optimizer.init(params)
    >>> for grad in (jnp.inf, 1.0, 1.0, 3.0):
    ...     scaled = grad * current_scale(state)
    ...     updates, state = optimizer.update(scaled, state, params)
    ...     print(float(updates))
    0.0
    0.0
    0.0
    -1.0
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[Any], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: None = None,
        **options: Any,
    ) -> None:
        if should_skip_update_fn is not None:
            name = getattr(should_skip_update_fn, "__name__", should_skip_update_fn)
            raise ConfigError(
                f"should_skip_update_fn={name} was given. A micro-batch that it skips "
                "never reaches loss_scaled, so a scale that is too high is never "
                "lowered and no step is taken. Leave it out: loss_scaled skips the "
                "step. To leave out single micro-batches, put optax.MultiSteps inside "
                "loss_scaled.",
                code="GS101",
            )
        super().__init__(opt, every_k_schedule, use_grad_mean, **options)

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
