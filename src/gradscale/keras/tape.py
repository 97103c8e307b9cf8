"""A `tf.GradientTape` that scales, unscales and retries at a lower scale."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gradscale.errors import ConfigError
from gradscale.keras.loss_scale import LossScale, loss_scale_of
from gradscale.keras.reading import divided, read


class LossScaleGradientTape(tf.GradientTape):
    """A gradient tape whose gradients are computed at a scale and returned unscaled.

    The class of TensorFlow 2.1 to 2.3. If a gradient is not finite on any replica, the
    scale is lowered and the gradients are computed again, until they are finite or the
    scale is at its floor; then they are not finite and should not be applied.

    >>> from gradscale.keras.tf import DynamicLossScale
    >>> weight, scale = tf.Variable(2.0), DynamicLossScale()
    >>> with LossScaleGradientTape(scale) as tape:
    ...     loss = weight * weight
    >>> float(tape.gradient(loss, weight))
    4.0

    Args:
        loss_scale: A `LossScale`, which keeps its scale from tape to tape, or a number
            for a fixed scale.
        persistent: `gradient` may be called more than once.
        watch_accessed_variables: As for `tf.GradientTape`.

    Raises:
        ConfigError: `loss_scale` is something else. It is a ValueError.
    """

    def __init__(
        self,
        loss_scale: Any,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
    ) -> None:
        # Always persistent: there may be several attempts.
        super().__init__(
            persistent=True, watch_accessed_variables=watch_accessed_variables
        )
        if not isinstance(loss_scale, (LossScale, int, float)):
            raise ConfigError(
                f"loss_scale={loss_scale!r} is a {type(loss_scale).__name__}. Every "
                "tape would start with a scale of its own. Make a DynamicLossScale() "
                "or LossScale(policy) once and pass it to each tape, or pass a number.",
                code="GS101",
            )
        self._loss_scale = loss_scale_of(loss_scale)
        self._once = not persistent

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return the gradients of `target`, unscaled, in the structure of `sources`.

        They have the dtypes of the sources.

        Raises:
            RuntimeError: Called a second time, and the tape is not persistent.
            ValueError: Called in a cross-replica context.
        """
        if self._tape is None:
            raise RuntimeError(
                "A non-persistent GradientTape can only be used to compute one set of "
                "gradients (or jacobians)"
            )
        if tf.distribute.in_cross_replica_context():
            raise ValueError("gradient() must be called in a replica context.")
        compute = super().gradient

        def attempt(scale: tf.Tensor) -> list[Any]:
            seeds = _seeds(target, output_gradients, scale)
            grads = compute(target, sources, seeds, unconnected_gradients)
            return [_unscaled(grad, scale) for grad in tf.nest.flatten(grads)]

        flat = _until_finite(self._loss_scale, attempt)
        if self._once:
            self._tape: Any = None
        return tf.nest.pack_sequence_as(sources, flat)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: a Jacobian has no loss to scale."""
        raise NotImplementedError(
            "LossScaleGradientTape computes no Jacobians. Use tf.GradientTape."
        )

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: a Jacobian has no loss to scale."""
        raise NotImplementedError(
            "LossScaleGradientTape computes no Jacobians. Use tf.GradientTape."
        )


def _seeds(target: Any, given: Any, scale: tf.Tensor) -> Any:
    """Return the output gradients times the scale; ones if none were given."""
    if given is None:
        return tf.nest.map_structure(
            lambda t: tf.ones_like(t) * tf.cast(scale, t.dtype), target
        )
    return tf.nest.map_structure(
        lambda t, g: (tf.ones_like(t) if g is None else g) * tf.cast(scale, t.dtype),
        target,
        given,
    )


def _unscaled(grad: Any, scale: tf.Tensor) -> Any:
    if grad is None:
        return None
    return tf.cast(divided(grad, scale), grad.dtype)


def _until_finite(
    loss_scale: LossScale, attempt: Callable[[tf.Tensor], list[Any]]
) -> list[Any]:
    """Return gradients of the first finite attempt, or of the last one."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return _loop(loss_scale, attempt, _finite)

    def on_all(strategy: Any, attempts: Any) -> Any:
        # In a cross-replica context: a loop may not reduce over replicas inside.
        each = strategy.extended.call_for_each_replica

        def compute(scale: tf.Tensor) -> list[Any]:
            return each(lambda one: one(scale), args=(attempts,))

        def finite(grads: Any) -> tf.Tensor:
            flags = each(_finite, args=(grads,))
            return tf.reduce_all(strategy.experimental_local_results(flags))

        return _loop(loss_scale, compute, finite)

    return context.merge_call(on_all, args=(attempt,))


def _finite(grads: list[Any]) -> tf.Tensor:
    return read(grads, [True] * len(grads), tf.constant(1.0)).finite


def _loop(
    loss_scale: LossScale,
    compute: Callable[[tf.Tensor], list[Any]],
    is_finite: Callable[[list[Any]], tf.Tensor],
) -> list[Any]:
    """Compute until finite or at the floor, and move the scale after each attempt."""
    floor = loss_scale.policy.min_scale
    places: list[int] = []
    size = 0

    def tried(*_: Any) -> tuple[Any, ...]:
        nonlocal size
        scale = loss_scale()
        grads = compute(scale)
        size = len(grads)
        places[:] = [place for place, grad in enumerate(grads) if grad is not None]
        kept = [grads[place] for place in places]
        if not kept:
            return tf.constant(False), kept
        finite = is_finite(kept)
        loss_scale.move(finite)
        return ~finite & (scale > floor), kept

    again, kept = tried()
    if kept:
        _, kept = tf.while_loop(lambda again, _: again, tried, (again, kept))
    grads: list[Any] = [None] * size
    for place, grad in zip(places, kept, strict=True):
        grads[place] = grad
    return grads
