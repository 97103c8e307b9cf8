"""What Keras' own class gets wrong, and ours right.

A scenario takes a class and fails where the class does. Keras' own must fail on the
backends that are named, and ours on none. Those of replicas are with the strategies.
"""

import keras
import numpy as np
import pytest
from keras import ops

from gradscale.keras import LossScaleOptimizer
from tests.keras.backends.steps import BACKEND, INF, values

KERAS = keras.optimizers.LossScaleOptimizer
SCENARIOS = []


def fails_on(*backends):
    """Enter a scenario and the backends on which Keras' own class fails it."""

    def enter(scenario):
        SCENARIOS.append((scenario, backends))
        return scenario

    return enter


def built(kind, **settings):
    weight = keras.Variable([1.0, 2.0])
    optimizer = kind(keras.optimizers.SGD(0.5), **settings)
    optimizer.build([weight])
    return optimizer, weight


def stepper(optimizer, weight):
    """Return a step by the way that Keras' own class has on this backend."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(lambda grad: optimizer.apply([grad], [weight]))
    if BACKEND == "torch":
        return lambda grad: optimizer.apply([ops.convert_to_tensor(grad)], [weight])
    import jax

    compiled = jax.jit(optimizer.stateless_apply)

    def step(grad):
        inside = [v.value for v in optimizer.variables]
        (new,), inside = compiled(inside, [grad], [weight.value])
        weight.assign(new)
        for variable, value in zip(optimizer.variables, inside, strict=True):
            variable.assign(value)

    return step


def scale_of(optimizer):
    return float(ops.convert_to_numpy(optimizer.dynamic_scale.value))


@fails_on("tensorflow", "jax", "torch")
def the_weights_stay_finite_after_170_overflows(kind):
    optimizer, weight = built(kind)
    step = stepper(optimizer, weight)
    for _ in range(170):
        step(np.array([INF, 1.0], "float32"))
    assert scale_of(optimizer) > 0.0
    step(np.array([0.0, 1e-8], "float32"))
    assert np.isfinite(values([weight])).all()


@fails_on("tensorflow", "jax", "torch")
def the_scale_stays_finite_after_130_growths(kind):
    optimizer, weight = built(kind, dynamic_growth_steps=1)
    step = stepper(optimizer, weight)
    for _ in range(130):
        step(np.zeros(2, "float32"))
    assert np.isfinite(scale_of(optimizer))
    step(np.full(2, scale_of(optimizer), "float32"))
    assert values([weight]) == [[0.5, 1.5]]


@fails_on("tensorflow", "jax")
def a_half_precision_loss_can_be_scaled_before_the_first_step(kind):
    optimizer = kind(keras.optimizers.SGD(0.5))
    scaled = optimizer.scale_loss(ops.cast(4.0, "float16"))
    assert float(ops.convert_to_numpy(scaled)) == 4.0 * 2.0**15


@fails_on("torch")
def half_precision_gradients_do_not_vanish_when_they_are_unscaled(kind):
    optimizer, weight = built(kind)
    weight.assign([0.0, 0.0])
    grad = ops.cast([2.0**-13, 0.0], "float16")
    if BACKEND == "jax":
        stepper(optimizer, weight)(grad)
    else:
        optimizer.apply([grad], [weight])
    assert values([weight]) == [[-(2.0**-29), 0.0]]


@fails_on("jax")
def gradients_can_be_applied_outside_of_fit(kind):
    optimizer, weight = built(kind, initial_scale=8.0)
    optimizer.apply([ops.convert_to_tensor([8.0, 16.0])], [weight])
    optimizer.apply([ops.convert_to_tensor([8.0, INF])], [weight])
    assert values([weight]) == [[0.5, 1.0]]


NAMES = [scenario.__name__ for scenario, _ in SCENARIOS]


@pytest.mark.parametrize(("scenario", "backends"), SCENARIOS, ids=NAMES)
def test_our_class_is_right(scenario, backends):
    scenario(LossScaleOptimizer)


@pytest.mark.parametrize(("scenario", "backends"), SCENARIOS, ids=NAMES)
def test_keras_own_class_fails_where_it_is_said_to(scenario, backends):
    if BACKEND not in backends:
        scenario(KERAS)
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011
        scenario(KERAS)
    # An assertion of the scenario, or what JAX raises for a leaked tracer.
    assert type(caught.value).__name__ in {"AssertionError", "UnexpectedTracerError"}
