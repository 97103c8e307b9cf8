"""The shapes of TF 1 and tf.keras 2, beside tf_keras' own class."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from gradscale import DynamicScale
from gradscale.errors import ConfigError
from gradscale.keras.tf import (
    DynamicLossScale,
    FixedLossScale,
    LossScaleOptimizer,
    MixedPrecisionLossScaleOptimizer,
)

INF, NAN = float("inf"), float("nan")
THEIRS = tf_keras.mixed_precision.LossScaleOptimizer


def facts(optimizer, weight):
    counter = optimizer.dynamic_counter
    return {
        "weight": weight.numpy().tolist(),
        "scale": float(optimizer.loss_scale),
        "counter": None if counter is None else int(counter),
        "iterations": int(optimizer.iterations),
    }


def run(kind, inner, grads, graph, **settings):
    """Return the facts after every step of a loop as tf.keras' page shows it."""
    optimizer = kind(inner, **settings)
    weight = tf.Variable([1.0, 2.0])

    def step(factor):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_sum(weight * factor))
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, [weight]))
        optimizer.apply_gradients(list(zip(grads, [weight], strict=True)))

    step = tf.function(step) if graph else step
    found = []
    for grad in grads:
        step(tf.constant(grad))
        found.append(facts(optimizer, weight))
    return found


TRACE = [[1.0, 2.0], [INF, 1.0], [0.5, NAN], [1.0, 1.0], [2.0, 1.0], [1.0, 3.0]]
INNERS = {
    "new": lambda: tf_keras.optimizers.Adam(0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "sgd": lambda: tf_keras.optimizers.SGD(0.5, momentum=0.9),
}


@pytest.mark.parametrize("graph", [True, False], ids=["tf.function", "eager"])
@pytest.mark.parametrize("inner", INNERS)
def test_a_dynamic_run_equals_that_of_tf_keras(graph, inner):
    settings = {"initial_scale": 2.0, "dynamic_growth_steps": 2}
    ours = run(LossScaleOptimizer, INNERS[inner](), TRACE, graph, **settings)
    theirs = run(THEIRS, INNERS[inner](), TRACE, graph, **settings)
    assert ours == theirs


def test_a_dynamic_run_with_the_defaults_equals_that_of_tf_keras():
    ours = run(LossScaleOptimizer, INNERS["new"](), TRACE, False)
    assert ours == run(THEIRS, INNERS["new"](), TRACE, False)


def test_a_fixed_run_equals_that_of_tf_keras_as_long_as_it_is_finite():
    finite = [TRACE[0], *TRACE[3:]]
    settings = {"dynamic": False, "initial_scale": 64.0}
    ours = run(LossScaleOptimizer, INNERS["sgd"](), finite, True, **settings)
    assert ours == run(THEIRS, INNERS["sgd"](), finite, True, **settings)


def test_a_fixed_scale_skips_where_tf_keras_ruins_the_weights():
    settings = {"dynamic": False, "initial_scale": 64.0}
    ours = run(LossScaleOptimizer, INNERS["sgd"](), [[INF, 1.0]], True, **settings)
    theirs = run(THEIRS, INNERS["sgd"](), [[INF, 1.0]], True, **settings)
    assert ours[0]["weight"] == [1.0, 2.0]
    assert theirs[0]["weight"][0] == -INF


def test_an_optimizer_of_keras_3_can_be_wrapped():
    ours = run(LossScaleOptimizer, keras.optimizers.SGD(0.5), TRACE[:3], True)
    assert [step["weight"] for step in ours] == [[0.5, 1.0]] * 3
    assert [step["scale"] for step in ours] == [2.0**15, 2.0**14, 2.0**13]


@pytest.mark.parametrize("settings", [{}, {"dynamic": False, "initial_scale": 4.0}])
def test_the_settings_read_as_in_tf_keras(settings):
    ours = LossScaleOptimizer(tf_keras.optimizers.SGD(0.5), **settings)
    theirs = THEIRS(tf_keras.optimizers.SGD(0.5), **settings)
    for name in ("dynamic", "initial_scale", "dynamic_growth_steps"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert float(ours.loss_scale) == float(theirs.loss_scale)
    assert float(ours.learning_rate) == 0.5
    ours_config, theirs_config = ours.get_config(), theirs.get_config()
    assert set(ours_config) == set(theirs_config)
    assert ours_config["dynamic_growth_steps"] == theirs_config["dynamic_growth_steps"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"dynamic": 1}, TypeError),
        ({"dynamic": False}, ValueError),
        (
            {"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 2},
            ValueError,
        ),
    ],
)
def test_what_tf_keras_refuses_is_refused(settings, error):
    for kind in (LossScaleOptimizer, THEIRS):
        with pytest.raises(error):
            kind(tf_keras.optimizers.SGD(0.5), **settings)


def test_a_loss_may_be_a_function():
    ours = LossScaleOptimizer(tf_keras.optimizers.SGD(0.5), initial_scale=4.0)
    assert float(ours.get_scaled_loss(lambda: tf.constant(3.0))()) == 12.0


def test_a_half_precision_loss_is_scaled_in_float32():
    ours = LossScaleOptimizer(tf_keras.optimizers.SGD(0.5))
    assert float(ours.get_scaled_loss(tf.constant(4.0, tf.float16))) == 4.0 * 2.0**15


def test_none_gradients_stay_and_none_at_all_is_an_error():
    ours = LossScaleOptimizer(tf_keras.optimizers.SGD(0.5))
    assert ours.get_unscaled_gradients([None]) == [None]
    with pytest.raises(ValueError, match="No gradients provided"):
        ours.apply_gradients([(None, tf.Variable(1.0))])


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: LossScaleOptimizer(tf_keras.optimizers.SGD(0.5)),
        lambda: THEIRS(tf_keras.optimizers.SGD(0.5)),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
    ],
)
def test_a_wrapped_optimizer_cannot_be_wrapped_again(wrapped):
    with pytest.raises(TypeError, match="cannot wrap another LossScaleOptimizer"):
        LossScaleOptimizer(wrapped())


def test_arguments_of_the_wrapped_optimizer_are_passed_on():
    weight = tf.Variable(3.0)
    ours = LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(0.5))
    pair = (tf.constant(2.0), weight)
    ours.apply_gradients([pair], name="n", experimental_aggregate_gradients=False)
    assert float(weight) == 2.0


def test_a_checkpoint_of_tensorflow_keeps_scale_and_counter(tmp_path):
    made = []
    for _ in range(2):
        ours = LossScaleOptimizer(tf_keras.optimizers.SGD(0.5), dynamic_growth_steps=3)
        ours.apply_gradients([(tf.constant(1.0), tf.Variable(1.0))])
        made.append(ours)
    first, second = made
    first.apply_gradients([(tf.constant(INF), tf.Variable(1.0))])
    path = tf.train.Checkpoint(optimizer=first).save(str(tmp_path / "state"))
    tf.train.Checkpoint(optimizer=second).restore(path).expect_partial()
    assert float(second.loss_scale) == 2.0**14
    assert int(second.dynamic_counter) == 0


def test_compile_of_tf_keras_refuses_it_and_fit_takes_it_in_a_train_step():
    ours = LossScaleOptimizer(tf_keras.optimizers.SGD(0.1), initial_scale=8.0)

    class Own(tf_keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                scaled = ours.get_scaled_loss(loss)
            variables = self.trainable_variables
            grads = ours.get_unscaled_gradients(tape.gradient(scaled, variables))
            ours.apply_gradients(zip(grads, variables, strict=True))
            return {"loss": loss}

    model = Own([tf_keras.layers.Dense(2, input_shape=(4,))])
    with pytest.raises(ValueError, match="Could not interpret optimizer identifier"):
        model.compile(ours, "mse")
    model.compile()
    x = np.random.RandomState(0).randn(32, 4).astype("float32")
    x[9] = NAN
    model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert (float(ours.loss_scale), int(ours.dynamic_counter)) == (4.0, 2)


def test_minimize_scales_and_unscales():
    weight = tf.Variable(3.0)
    ours = LossScaleOptimizer(tf_keras.optimizers.SGD(0.5))
    ours.minimize(lambda: weight * weight, [weight])
    assert float(weight) == 0.0


def test_a_policy_replaces_the_settings():
    policy = DynamicScale(init_scale=1.0, min_scale=0.25)
    found = run(
        LossScaleOptimizer, INNERS["sgd"](), [[INF, 1.0]] * 4, True, policy=policy
    )
    assert [step["scale"] for step in found] == [0.5, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("inner", ["sgd", "legacy"])
def test_nan_on_one_replica_skips_on_all(strategy, inner):
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(INNERS[inner](), initial_scale=8.0)

    def step(bad):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        grad = tf.where(tf.equal(replica, bad), NAN, tf.fill([2], 1.0))
        optimizer.apply_gradients([(grad, weight)])

    compiled = tf.function(lambda bad: strategy.run(step, args=(bad,)))
    compiled(tf.constant(-1))
    before = weight.numpy().tolist()
    assert before != [1.0, 2.0]
    for bad, scale in ((0, 4.0), (1, 2.0)):
        compiled(tf.constant(bad))
        assert weight.numpy().tolist() == before
        assert float(optimizer.loss_scale) == scale


# --- TF 1 -----------------------------------------------------------------------------


def test_a_dynamic_loss_scale_moves_as_that_of_tf_1():
    v1 = tf.compat.v1.mixed_precision
    ours = DynamicLossScale(4.0, increment_period=2)
    theirs = v1.DynamicLossScale(4.0, increment_period=2)
    for grad in (1.0, INF, NAN, 1.0, 1.0, INF, INF, INF, 2.0, 2.0):
        flags = [bool(s.update([tf.constant([grad])])[1]) for s in (ours, theirs)]
        assert flags[0] == flags[1]
        assert float(ours()) == float(theirs())


def test_a_fixed_loss_scale_stays():
    ours = FixedLossScale(8.0)
    assert not bool(ours.update([tf.constant([INF])])[1])
    assert float(ours()) == 8.0


@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_an_optimizer_of_tf_1_trains_and_skips(loss_scale):
    weight = tf.Variable([1.0, 2.0])
    inner = tf.compat.v1.train.MomentumOptimizer(0.5, 0.9)
    optimizer = MixedPrecisionLossScaleOptimizer(inner, loss_scale)
    optimizer.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])
    assert weight.numpy().tolist() == [0.5, 1.5]
    optimizer.minimize(lambda: tf.reduce_sum(weight * [1.0, INF]), var_list=[weight])
    assert weight.numpy().tolist() == [0.5, 1.5]


def test_no_gradient_at_all_is_an_error_in_tf_1_too():
    inner = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    optimizer = MixedPrecisionLossScaleOptimizer(inner, "dynamic")
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, tf.Variable(1.0))])


def test_a_scale_below_one_can_be_the_first():
    assert float(DynamicLossScale(0.5)()) == 0.5


def test_an_update_without_gradients_is_finite():
    assert bool(DynamicLossScale(8.0).update([None])[1])


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="is a str"):
        MixedPrecisionLossScaleOptimizer(None, "static")


def test_weights_stay_finite_in_a_float16_loop():
    weight = tf.Variable(np.ones(4, "float32"))
    optimizer = LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            half = tf.cast(weight, tf.float16)
            loss = optimizer.get_scaled_loss(tf.reduce_sum(half * half * 16.0))
        grads = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        optimizer.apply_gradients(zip(grads, [weight], strict=True))

    for _ in range(10):
        step()
    assert np.isfinite(weight.numpy()).all()
    assert float(optimizer.loss_scale) < 2.0**15
