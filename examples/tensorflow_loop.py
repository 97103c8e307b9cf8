"""A TensorFlow training loop with `tf.GradientTape`, compiled by `tf.function`.

With `--replicas 2` the same loop runs under `MirroredStrategy` on virtual CPUs. In step
5 the gradient of the last replica is NaN on purpose: all replicas skip that step.

  python examples/tensorflow_loop.py
  python examples/tensorflow_loop.py --replicas 2
  python examples/tensorflow_loop.py --json      the figures for a program
"""

import argparse
import json
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

from gradscale.keras import LossScaleOptimizer

BATCH, BAD_STEP = 64, 5


def train(replicas: int, steps: int, seed: int) -> dict[str, Any]:
    """Train and return the figures of the run."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
    )
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices)
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("mixed_float16")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,)),
                keras.layers.Dense(64, activation="tanh"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(2e-2))
        optimizer.build(model.trainable_variables)

    def replica_step(x: tf.Tensor, y: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        last = context.replica_id_in_sync_group == replicas - 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            loss = loss * tf.where(last & bad, float("nan"), 1.0)
            # The gradients of the replicas are added.
            scaled = optimizer.scale_loss(loss / replicas)
        variables = model.trainable_variables
        grads = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, bad: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(replica_step, args=(x, y, bad))
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)

    rng, losses, culprits = np.random.default_rng(seed), [], 0
    for number in range(1, steps + 1):
        x = rng.uniform(-2.0, 2.0, (BATCH, 1)).astype("float32")
        bad = tf.constant(number == BAD_STEP)
        loss = step(tf.constant(x), tf.constant(x**3 - 2.0 * x), bad)
        losses.append(float(loss))
        if number == BAD_STEP:
            culprits = len(optimizer.last.culprits)
    return {
        "loss": [losses[0], losses[-1]],
        "applied": optimizer.applied_steps,
        "skipped": optimizer.skipped_steps,
        "scale": optimizer.scale,
        "culprits": culprits,
    }


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = train(options.replicas, options.steps, options.seed)
    if options.json:
        print(json.dumps(figures))
        return
    first, last = figures["loss"]
    print(
        f"loss {first:.2f} -> {last:.2f}, {figures['applied']} steps applied, "
        f"{figures['skipped']} skipped; step {BAD_STEP} had "
        f"{figures['culprits']} gradients that were not finite"
    )


if __name__ == "__main__":
    main()
