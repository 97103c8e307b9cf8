"""Two workers of a MultiWorkerMirroredStrategy; run by test_multi_worker.

The process forks once TensorFlow is imported: importing it twice takes seconds.
"""

import json
import os
import socket
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

from gradscale.keras import LossScaleOptimizer, Monitor


def steps(strategy, rank, path):
    """Step with NaN on no worker, on worker 1 and on worker 0."""
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0], name="w")
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
        optimizer.build([weight])

    def step(bad):
        nan = tf.equal(rank, bad)
        grad = tf.where(nan, float("nan"), tf.fill([2], 8.0))
        optimizer.apply([grad], [weight])

    run = tf.function(lambda bad: strategy.run(step, args=(bad,)))
    found = []
    with Monitor(record=path, quiet=True) as monitor:
        for bad in (-1, 1, 0):
            run(tf.constant(bad))
            monitor.step(optimizer)
            found.append([weight.numpy().tolist(), optimizer.scale])
    return {
        "steps": found,
        "culprits": optimizer.last.culprits,
        "writes": monitor.path is not None,
    }


def fit(strategy):
    """Fit with an optimizer of Keras alone; return the error, if there is one."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    x = np.ones((16, 4), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)
    try:
        model.fit(data, verbose=0, shuffle=False)
    except ValueError as error:
        return str(error)
    return ""


def main(folder):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    workers = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    rank = 1 if os.fork() == 0 else 0
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    found = steps(strategy, rank, folder + "/run.gs")
    found["error of fit"] = fit(strategy)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    if rank == 0:
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1])
