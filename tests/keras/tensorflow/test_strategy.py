"""MirroredStrategy: a gradient that is not finite on any replica skips on all."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradscale.keras import LossScaleOptimizer, Monitor
from gradscale.runfile import open_run

NAN = float("nan")


def built(strategy, kind=LossScaleOptimizer, inner=keras.optimizers.SGD):
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0], name="w")
        optimizer = kind(inner(0.5), initial_scale=8.0)
        optimizer.build([weight])
    return optimizer, weight


def stepper(strategy, optimizer, weight, graph=True):
    """Return a function that steps with NaN on the replica that is passed, or none."""

    def step(bad):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        grad = tf.where(tf.equal(replica, bad), NAN, tf.fill([2], 8.0))
        optimizer.apply([grad], [weight])

    def run(bad):
        strategy.run(step, args=(bad,))

    compiled = tf.function(run) if graph else run
    return lambda bad: compiled(tf.constant(bad))


@pytest.mark.parametrize("graph", [True, False], ids=["tf.function", "eager"])
def test_nan_on_one_replica_skips_on_all(strategy, graph):
    optimizer, weight = built(strategy)
    step = stepper(strategy, optimizer, weight, graph)
    step(-1)
    # The gradients of the replicas are added.
    assert weight.numpy().tolist() == [0.0, 1.0]
    for bad, scale in ((0, 4.0), (1, 2.0)):
        step(bad)
        assert [v.numpy().tolist() for v in weight.value.values] == [[0.0, 1.0]] * 2
        assert optimizer.scale == scale
        assert optimizer.last.culprits == ("w",)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (1, 2)


def test_nan_on_replica_1_reaches_the_weights_with_keras_own_class(strategy):
    optimizer, weight = built(strategy, keras.optimizers.LossScaleOptimizer)
    stepper(strategy, optimizer, weight)(1)
    assert np.isnan(weight.numpy()).all()


def test_an_unaffected_run_equals_that_of_keras_own_class(strategy):
    found = []
    for kind in (LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
        optimizer, weight = built(strategy, kind, keras.optimizers.Adam)
        step = stepper(strategy, optimizer, weight)
        for _ in range(3):
            step(-1)
        found.append(weight.numpy().tolist())
    assert found[0] == found[1]


def test_a_cross_replica_context_is_refused_as_by_keras(strategy):
    optimizer, weight = built(strategy)
    with strategy.scope(), pytest.raises(ValueError, match="in a replica context"):
        optimizer.apply([tf.ones(2)], [weight])


def test_nan_in_the_batch_of_either_replica_is_skipped_by_fit(strategy, tmp_path):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1))
        model.compile(optimizer, loss="mse")
    x = np.random.RandomState(0).randn(32, 4).astype("float32")
    # Of eight rows, the first four go to replica 0.
    x[8], x[22] = NAN, NAN
    weights = model.get_weights()
    monitor = Monitor(record=tmp_path / "run.gs", quiet=True)
    model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0, callbacks=[monitor])
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (2, 2)
    with open_run(tmp_path / "run.gs") as run:
        rows = list(run.steps())
    assert [row.applied for row in rows] == [True, False, False, True]
    error = x[:8] @ weights[0] + weights[1] - x[:8, :2]
    assert np.isclose(rows[0].loss, np.mean(error**2), rtol=1e-5)
    assert np.isfinite(rows[3].loss)


def test_nan_in_the_batch_of_replica_1_ruins_keras_own_class_in_fit(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
        model.compile(optimizer, loss="mse")
    x = np.random.RandomState(0).randn(32, 4).astype("float32")
    x[22] = NAN
    model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
    assert np.isnan(model.get_weights()[0]).all()
