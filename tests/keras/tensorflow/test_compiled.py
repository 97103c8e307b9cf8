"""`tf.function`, XLA and custom loops on TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradscale.keras import LossScaleOptimizer

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_compiled_step_is_skipped_if_one_of_many_elements_is_bad(jit_compile, bad):
    # XLA drops NaN from a maximum of that many.
    weight = keras.Variable(np.zeros(1000, "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer.build([weight])

    @tf.function(jit_compile=jit_compile)
    def step(grad):
        optimizer.apply([grad], [weight])

    grad = np.full(1000, 4.0, "float32")
    step(tf.constant(grad))
    grad[500] = bad
    step(tf.constant(grad))
    assert weight.numpy().tolist() == [-1.0] * 1000
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (1, 1)
    assert optimizer.last.culprits == (weight.path,)
    assert np.isnan(optimizer.last.amax) == np.isnan(bad)


def test_a_training_loop_with_a_gradient_tape():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1))
    x = tf.random.stateless_normal((64, 4), (1, 2))
    y = tf.reduce_sum(x, 1, keepdims=True)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(model(x), tf.float32) - y) ** 2)
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(scaled, variables), variables, strict=True)
        )
        return loss

    losses = [float(step()) for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]
    assert optimizer.applied_steps + optimizer.skipped_steps == 40
