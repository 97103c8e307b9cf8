"""Policies as TensorFlow objects with variables: `LossScale` and its TF 1 names."""

from typing import Any

import keras
import tensorflow as tf

from gradscale.core.policies import DynamicScale, Policy, StaticScale
from gradscale.core.state import Observed, ScaleState
from gradscale.errors import ConfigError
from gradscale.keras.reading import Reading, judged, read
from gradscale.keras.replicas import largest_of_replicas
from gradscale.keras.settings import GROWTH_STEPS, INITIAL_SCALE, policy_of

# TensorFlow's own classes never go below it.
FLOOR = 1.0


class LossScale(tf.Module):
    """A policy and its state in TensorFlow variables.

    >>> scale = LossScale(DynamicScale(init_scale=8.0))
    >>> float(scale())
    8.0
    >>> _, applied = scale.update([tf.constant([1.0, float("inf")])])
    >>> bool(applied), float(scale())
    (False, 4.0)

    Args:
        policy: Settings and rule.

    Attributes:
        policy: As given.
        counter: i64[], finite steps in a row; None if the scale is fixed.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        if keras.backend.backend() != "tensorflow":
            raise ConfigError(
                f"The backend of Keras is {keras.backend.backend()}. This part of "
                "gradscale computes with TensorFlow. Set KERAS_BACKEND=tensorflow "
                "before keras is imported.",
                code="GS101",
            )
        self.policy = policy_of(policy, INITIAL_SCALE, GROWTH_STEPS)
        first = self.policy.init_state()
        self._state: ScaleState | None = None
        if isinstance(first, ScaleState):
            self._state = ScaleState(
                _variable(first.scale, tf.float32, "scale"),
                _variable(0, tf.int64, "counter"),
                _variable(0, tf.int64, "debt"),
            )
        self.counter = None if self._state is None else self._state.finite_steps

    def __call__(self) -> tf.Tensor:
        """Return f32[], the scale for the next loss."""
        if self._state is None:
            return tf.constant(self.policy.init_state().scale)
        return tf.convert_to_tensor(self._state.scale)

    def read(self, grads: Any) -> Reading:
        """Read unscaled gradients; all replicas get the same result."""
        flat = [g for g in tf.nest.flatten(grads) if g is not None] or [tf.zeros(())]
        scaled = [True] * len(flat)
        seen = read(flat, scaled, tf.constant(1.0))
        if tf.distribute.in_cross_replica_context():
            return seen
        return judged(largest_of_replicas(seen.peaks), scaled)

    def update(self, grads: Any) -> tuple[None, tf.Tensor]:
        """Move the scale by what the gradients show.

        Args:
            grads: A structure of unscaled gradients.

        Returns:
            None, in the place of TF 1's operation, and bool[]: the gradients are
            finite and may be applied.
        """
        seen = self.read(grads)
        self.move(seen.finite, seen.amax)
        return None, seen.finite

    def move(self, finite: tf.Tensor, amax: tf.Tensor | float = 0.0) -> None:
        """Move the scale after a step.

        Args:
            finite: bool[], all gradients were finite.
            amax: f32[], the largest magnitude among them.
        """
        if self._state is None:
            return
        before = ScaleState(*map(tf.convert_to_tensor, self._state))
        observed = Observed(finite, amax, True)
        after = self.policy.next_state(before, observed, keras.ops.where)
        for variable, value in zip(self._state, after, strict=True):
            variable.assign(tf.cast(value, variable.dtype))


class FixedLossScale(LossScale):
    """The name of TF 1 for a `StaticScale`.

    Args:
        loss_scale_value: The scale.
    """

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__(StaticScale(scale=loss_scale_value))


class DynamicLossScale(LossScale):
    """The name of TF 1 for a `DynamicScale` with a floor of 1.

    Args:
        initial_loss_scale: The first scale.
        increment_period: Finite steps in a row after which the scale grows.
        multiplier: The scale is multiplied or divided by it.
    """

    def __init__(
        self,
        initial_loss_scale: float = INITIAL_SCALE,
        increment_period: int = GROWTH_STEPS,
        multiplier: float = 2.0,
    ) -> None:
        super().__init__(
            dynamic_policy(initial_loss_scale, increment_period, multiplier)
        )


def dynamic_policy(
    initial_scale: float, growth_steps: int, multiplier: float = 2.0
) -> DynamicScale:
    """Return the rule of TensorFlow's own classes.

    >>> dynamic_policy(8.0, 2000).min_scale, dynamic_policy(0.25, 2000).min_scale
    (1.0, 0.25)
    """
    return DynamicScale(
        init_scale=initial_scale,
        growth_factor=multiplier,
        backoff_factor=1.0 / multiplier,
        growth_interval=growth_steps,
        min_scale=min(FLOOR, initial_scale),
    )


def loss_scale_of(given: Any) -> LossScale:
    """Return the loss scale that a number, "dynamic" or a policy stands for.

    >>> float(loss_scale_of(64)())
    64.0
    >>> float(loss_scale_of("dynamic")())
    32768.0
    """
    if isinstance(given, LossScale):
        return given
    if given == "dynamic":
        return DynamicLossScale()
    if isinstance(given, (int, float)):
        return FixedLossScale(given)
    return LossScale(given)


def _variable(value: float, dtype: tf.DType, name: str) -> tf.Variable:
    # Never aggregated: all replicas assign the same.
    return tf.Variable(
        value,
        dtype=dtype,
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
