"""Loss scaling with the API of TensorFlow 1 and tf.keras 2, and gradscale's policies.

For training loops that were written for it. `LossScaleOptimizer` has the methods of
tf.keras 2 and wraps optimizers of Keras 3 and of tf_keras. It works in eager mode and
in `tf.function`, not in graphs of TF 1.

>>> import keras, tensorflow as tf
>>> from gradscale.keras.tf import LossScaleOptimizer
>>> weight = tf.Variable(3.0)
>>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
>>> with tf.GradientTape() as tape:
...     loss = optimizer.get_scaled_loss(weight * weight)
>>> grads = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
>>> optimizer.apply_gradients(zip(grads, [weight]))
>>> float(weight), float(optimizer.loss_scale)
(0.0, 32768.0)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from gradscale.core.policies import DynamicScale, Policy, StaticScale
from gradscale.errors import ConfigError
from gradscale.keras.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    dynamic_policy,
    loss_scale_of,
)
from gradscale.keras.reading import divided, multiplied
from gradscale.keras.replicas import branch
from gradscale.keras.settings import GROWTH_STEPS, INITIAL_SCALE
from gradscale.keras.tape import LossScaleGradientTape

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScale",
    "LossScaleGradientTape",
    "LossScaleOptimizer",
    "MixedPrecisionLossScaleOptimizer",
]


class _Scaled:
    """Base class of the optimizers: one `LossScale` and one step method."""

    _loss_scale: LossScale
    _inner: Any

    def _scaled(self, loss: Any) -> Any:
        """Return a loss or a function of one, scaled, in f32 at least."""
        if callable(loss):
            function = loss
            return lambda: multiplied(function(), self._loss_scale())
        return multiplied(loss, self._loss_scale())

    def _unscaled(self, grads: Iterable[Any]) -> list[Any]:
        scale = self._loss_scale()
        return [g if g is None else divided(g, scale) for g in grads]

    def _step(
        self,
        grads: Sequence[Any],
        apply: Callable[[Sequence[Any]], None],
        skip: Callable[[], None],
    ) -> None:
        """Apply gradients if they are finite on all replicas; move the scale."""
        seen = self._loss_scale.read(grads)

        def settle() -> None:
            self._loss_scale.move(seen.finite, seen.amax)

        branch(seen.finite, lambda *own: apply(own), settle, *grads, skip=skip)


class LossScaleOptimizer(_Scaled, tf.Module):
    """The `LossScaleOptimizer` of tf.keras 2, for custom training loops.

    Unlike the original, a fixed scale skips steps that are not finite too, a loss
    in half precision is scaled in float32, and a gradient in half precision is
    unscaled in float32. The scale has a floor of 1, as in the original; pass a policy
    for another one.

    It is not for `compile`: use `gradscale.keras.LossScaleOptimizer` with Keras 3.

    Args:
        inner_optimizer: An optimizer of Keras 3 or of tf_keras.
        dynamic: False for a fixed scale.
        initial_scale: The first scale; required if it is fixed.
        dynamic_growth_steps: Finite steps in a row after which the scale doubles.
        policy: Settings and rule, instead of the three before.

    Raises:
        ConfigError: The arguments contradict each other. It is a ValueError.
        TypeError: `dynamic` is not a bool, or the optimizer is wrapped already.

    Attributes:
        inner_optimizer: As given.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        dynamic: bool = True,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        *,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(name="loss_scale_optimizer")
        if not isinstance(dynamic, bool):
            # The message of tf.keras.
            raise TypeError(
                '"dynamic" argument to LossScaleOptimizer.__init__ must be a bool, '
                f"but got: {dynamic!r}"
            )
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer) or hasattr(
            inner_optimizer, "get_unscaled_gradients"
        ):
            # The message of tf.keras.
            raise TypeError(
                "LossScaleOptimizer cannot wrap another LossScaleOptimizer, but got: "
                f"{inner_optimizer}"
            )
        self._inner = inner_optimizer
        if policy is None:
            policy = _policy(dynamic, initial_scale, dynamic_growth_steps)
        self._loss_scale = LossScale(policy)
        # Else Keras would unscale a second time.
        if getattr(inner_optimizer, "loss_scale_factor", None) is not None:
            inner_optimizer.loss_scale_factor = None

    @property
    def inner_optimizer(self) -> Any:
        """The wrapped optimizer."""
        return self._inner

    @property
    def dynamic(self) -> bool:
        """False if the scale is fixed."""
        return isinstance(self._loss_scale.policy, DynamicScale)

    @property
    def loss_scale(self) -> tf.Tensor:
        """f32[], the scale for the next loss."""
        return self._loss_scale()

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """i64[], finite steps in a row; None if the scale is fixed."""
        return self._loss_scale.counter if self.dynamic else None

    @property
    def initial_scale(self) -> float:
        """The first scale."""
        return self._loss_scale.policy.init_state().scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps after which the scale grows; None if it is fixed."""
        policy = self._loss_scale.policy
        return policy.growth_interval if isinstance(policy, DynamicScale) else None

    @property
    def iterations(self) -> Any:
        """The steps that the wrapped optimizer counts.

        Those of tf_keras count skipped steps, those of Keras 3 do not.
        """
        return self._inner.iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the wrapped optimizer."""
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._inner.learning_rate = value

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return the loss times the scale.

        Args:
            loss: A tensor, or a function without arguments that returns one.
        """
        return self._scaled(loss)

    def get_unscaled_gradients(self, grads: Iterable[Any]) -> list[Any]:
        """Return the gradients divided by the scale, in f32 at least; None is kept."""
        return self._unscaled(grads)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], **kwargs: Any
    ) -> None:
        """Apply unscaled gradients, or skip the step; move the scale.

        Args:
            grads_and_vars: Pairs; a gradient may be None.
            kwargs: Further arguments of the wrapped optimizer's `apply_gradients`.

        Raises:
            ValueError: There is no gradient, or this is a cross-replica context.
        """
        grads, variables = _with_gradients(grads_and_vars)
        _build(self._inner, variables)

        def apply(grads: Sequence[Any]) -> None:
            pairs = list(zip(grads, variables, strict=True))
            self._inner.apply_gradients(pairs, **kwargs)

        self._step(grads, apply, self._count)

    def minimize(
        self, loss: Callable[[], Any] | Any, var_list: Sequence[Any], tape: Any = None
    ) -> None:
        """Compute the gradients of a loss and apply them.

        Args:
            loss: A function without arguments, or a tensor that `tape` has recorded.
            var_list: The variables.
            tape: The tape, if `loss` is a tensor.
        """
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            scaled = self.get_scaled_loss(loss)
            scaled = scaled() if callable(scaled) else scaled
        grads = self.get_unscaled_gradients(tape.gradient(scaled, var_list))
        self.apply_gradients(zip(grads, var_list, strict=True))

    def get_config(self) -> dict[str, Any]:
        """Return the four keys of tf.keras; the policy's bounds are not among them."""
        return {
            "inner_optimizer": _serialized(self._inner),
            "dynamic": self.dynamic,
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
        }

    def _count(self) -> None:
        """Count a skipped step where tf_keras would."""
        if not isinstance(self._inner, keras.optimizers.Optimizer):
            self._inner.iterations.assign_add(1)


class MixedPrecisionLossScaleOptimizer(_Scaled, tf.compat.v1.train.Optimizer):
    """The loss-scaling wrapper of TF 1 around an optimizer of TF 1.

    Works in eager mode and in `tf.function`, with a function as loss.

    >>> weight = tf.Variable(3.0)
    >>> sgd = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    >>> optimizer = MixedPrecisionLossScaleOptimizer(sgd, "dynamic")
    >>> optimizer.minimize(lambda: weight * weight, var_list=[weight])
    >>> float(weight)
    0.0

    Args:
        optimizer: A `tf.compat.v1.train.Optimizer`.
        loss_scale: A `LossScale`, a policy, a number for a fixed scale, or "dynamic".
    """

    def __init__(self, optimizer: Any, loss_scale: Any) -> None:
        super().__init__(False, type(self).__name__)
        self._inner = optimizer
        self._loss_scale = loss_scale_of(loss_scale)

    def compute_gradients(
        self, loss: Any, var_list: Any = None, *args: Any, **kwargs: Any
    ) -> list[tuple[Any, Any]]:
        """Return pairs of unscaled gradients and variables."""
        pairs = self._inner.compute_gradients(
            self._scaled(loss), var_list, *args, **kwargs
        )
        grads = self._unscaled(grad for grad, _ in pairs)
        return list(zip(grads, (variable for _, variable in pairs), strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> None:
        """Apply unscaled gradients, or skip the step; move the scale."""
        grads, variables = _with_gradients(grads_and_vars)
        with tf.init_scope():
            self._inner._create_slots(variables)

        def apply(grads: Sequence[Any]) -> None:
            self._inner.apply_gradients(
                list(zip(grads, variables, strict=True)), global_step, name
            )

        self._step(grads, apply, lambda: None)


def _policy(
    dynamic: bool, initial_scale: float | None, growth_steps: int | None
) -> Policy:
    if dynamic:
        return dynamic_policy(
            INITIAL_SCALE if initial_scale is None else initial_scale,
            GROWTH_STEPS if growth_steps is None else growth_steps,
        )
    if initial_scale is None or growth_steps is not None:
        raise ConfigError(
            f"dynamic=False came with initial_scale={initial_scale} and "
            f"dynamic_growth_steps={growth_steps}. A fixed scale has a value and "
            'never grows: "initial_scale" must be specified if "dynamic" is False, '
            'and "dynamic_growth_steps" must be None.',
            code="GS101",
        )
    return StaticScale(scale=initial_scale)


def _with_gradients(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the gradients that are not None, and their variables."""
    found = [(grad, variable) for grad, variable in pairs if grad is not None]
    if not found:
        raise ValueError("No gradients provided for any variable.")
    return [grad for grad, _ in found], [variable for _, variable in found]


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the variables of an optimizer, outside of any branch."""
    with tf.init_scope():
        if isinstance(optimizer, keras.optimizers.Optimizer):
            if not optimizer.built:
                optimizer.build(list(variables))
        elif hasattr(optimizer, "build"):
            optimizer.build(list(variables))
        else:
            # Those of tf_keras.optimizers.legacy.
            optimizer._create_all_weights(list(variables))


def _serialized(optimizer: Any) -> Mapping[str, Any]:
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return keras.optimizers.serialize(optimizer)
    import tf_keras

    return tf_keras.optimizers.serialize(optimizer)
