"""`LossScaleGradientTape`: scaled, unscaled, tried again at a lower scale."""

import pytest
import tensorflow as tf

from gradscale.keras.tf import DynamicLossScale, FixedLossScale, LossScaleGradientTape

INF = float("inf")
MODES = {"eager": lambda f: f, "tf.function": tf.function}


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gradients_are_those_of_a_plain_tape_in_the_dtype_of_the_source(mode, dtype):
    x = tf.constant([1.0, 2.0], dtype)
    scale = DynamicLossScale(2.0**10)

    def gradient():
        with LossScaleGradientTape(scale) as tape:
            tape.watch(x)
            y = tf.reduce_sum(x * x)
        return tape.gradient(y, x)

    grad = mode(gradient)()
    assert grad.dtype == dtype
    assert grad.numpy().tolist() == [2.0, 4.0]


def test_a_gradient_too_small_for_float16_is_kept_in_a_float32_source(mode):
    w = tf.Variable(1.0)

    def gradient(make):
        with make() as tape:
            y = tf.cast(w, tf.float16) * 2.0**-14
            y = tf.cast(y, tf.float32) * 2.0**-12
        return tape.gradient(y, w)

    plain = mode(lambda: gradient(tf.GradientTape))()
    ours = mode(lambda: gradient(lambda: LossScaleGradientTape(2.0**12)))()
    assert (float(plain), float(ours)) == (0.0, 2.0**-26)


def test_an_overflow_is_tried_again_at_a_lower_scale(mode):
    w = tf.Variable(1.0)
    scale = DynamicLossScale(2.0**15)

    def gradient():
        with LossScaleGradientTape(scale) as tape:
            y = tf.cast(tf.cast(w, tf.float16) * 64.0, tf.float32)
        return tape.gradient(y, w)

    assert float(mode(gradient)()) == 64.0
    # 64 * 2^9 is the first below 65504.
    assert float(scale()) == 2.0**9


def test_an_overflow_that_never_goes_away_ends_at_the_floor(mode):
    w = tf.Variable(1.0)
    scale = DynamicLossScale(2.0**4)

    def gradient():
        with LossScaleGradientTape(scale) as tape:
            y = w * INF
        return tape.gradient(y, w)

    assert float(mode(gradient)()) == INF
    assert float(scale()) == 1.0


def test_a_fixed_scale_is_tried_once(mode):
    w = tf.Variable(1.0)
    scale = FixedLossScale(2.0**15)

    def gradient():
        with LossScaleGradientTape(scale) as tape:
            y = tf.cast(tf.cast(w, tf.float16) * 64.0, tf.float32)
        return tape.gradient(y, w)

    assert float(mode(gradient)()) == INF


def test_a_structure_of_sources_with_none_and_zero_gradients(mode):
    a, b, c = tf.Variable(2.0), tf.Variable(3.0), tf.Variable([1.0, 1.0])
    scale = DynamicLossScale()

    def gradient(unconnected):
        with LossScaleGradientTape(scale) as tape:
            y = a * a + 0.0 * tf.reduce_sum(c)
        sources = {"a": a, "rest": [b, c]}
        return tape.gradient(y, sources, unconnected_gradients=unconnected)

    grads = gradient(tf.UnconnectedGradients.NONE)
    assert float(grads["a"]) == 4.0
    assert grads["rest"][0] is None
    assert grads["rest"][1].numpy().tolist() == [0.0, 0.0]
    zero = mode(lambda: gradient(tf.UnconnectedGradients.ZERO))()
    assert float(zero["rest"][0]) == 0.0


def test_no_connected_source_at_all_gives_none():
    a, b = tf.Variable(2.0), tf.Variable(3.0)
    with LossScaleGradientTape(DynamicLossScale()) as tape:
        y = a * a
    assert tape.gradient(y, [b]) == [None]


def test_given_output_gradients_are_multiplied(mode):
    x = tf.constant([1.0, 2.0])

    def gradient():
        with LossScaleGradientTape(8.0) as tape:
            tape.watch(x)
            y = x * x
        return tape.gradient(y, x, output_gradients=tf.constant([1.0, 10.0]))

    assert mode(gradient)().numpy().tolist() == [2.0, 40.0]


def test_several_targets_are_added():
    x = tf.Variable(3.0)
    with LossScaleGradientTape(DynamicLossScale()) as tape:
        y, z = x * x, 2.0 * x
    assert float(tape.gradient([y, z], x)) == 8.0


def test_a_tape_that_is_not_persistent_gives_gradients_once():
    x = tf.Variable(3.0)
    with LossScaleGradientTape(DynamicLossScale()) as tape:
        y = x * x
    tape.gradient(y, x)
    with pytest.raises(RuntimeError, match="non-persistent"):
        tape.gradient(y, x)


def test_a_persistent_tape_gives_gradients_again():
    x = tf.Variable(3.0)
    with LossScaleGradientTape(DynamicLossScale(), persistent=True) as tape:
        y = x * x
        z = y * y
    assert float(tape.gradient(y, x)) == 6.0
    assert float(tape.gradient(z, x)) == 108.0


@pytest.mark.parametrize("plain", [True, False])
def test_tapes_can_be_nested(mode, plain):
    x = tf.Variable(3.0)
    outer_scale = DynamicLossScale(2.0**6)
    inner_scale = DynamicLossScale(2.0**8)

    def gradient():
        with (
            tf.GradientTape() if plain else LossScaleGradientTape(outer_scale) as second
        ):
            with LossScaleGradientTape(inner_scale) as first:
                y = x * x * x
            slope = first.gradient(y, x)
        return slope, second.gradient(slope, x)

    slope, curvature = mode(gradient)()
    assert (float(slope), float(curvature)) == (27.0, 18.0)


def test_complex_gradients_are_unscaled():
    x = tf.Variable(tf.constant(1.0 + 2.0j, tf.complex64))
    with LossScaleGradientTape(8.0) as tape, tf.GradientTape() as plain:
        y = tf.math.real(x * tf.math.conj(x))
    assert complex(tape.gradient(y, x)) == complex(plain.gradient(y, x)) == 2.0 + 4.0j


def test_sparse_gradients_are_unscaled():
    table = tf.Variable(tf.ones((4, 2)))
    with LossScaleGradientTape(DynamicLossScale()) as tape:
        y = tf.reduce_sum(tf.gather(table, [1, 1]) * 3.0)
    grad = tape.gradient(y, table)
    assert isinstance(grad, tf.IndexedSlices)
    assert tf.convert_to_tensor(grad).numpy().tolist()[1] == [6.0, 6.0]


@pytest.mark.parametrize("graph", [True, False], ids=["tf.function", "eager"])
def test_two_replicas_lower_the_scale_together(strategy, graph):
    with strategy.scope():
        w = tf.Variable(1.0)
        scale = DynamicLossScale(2.0**15)

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        factor = tf.where(tf.equal(replica, 1), 64.0, 1.0)
        with LossScaleGradientTape(scale) as tape:
            half = tf.cast(w, tf.float16) * tf.cast(factor, tf.float16)
            y = tf.cast(half, tf.float32)
        return tape.gradient(y, w)

    def run():
        return strategy.run(step)

    run = tf.function(run) if graph else run
    grads = strategy.experimental_local_results(run())
    assert [float(grad) for grad in grads] == [1.0, 64.0]
    assert float(scale()) == 2.0**9


def test_jacobians_are_refused():
    with LossScaleGradientTape(DynamicLossScale()) as tape:
        pass
    with pytest.raises(NotImplementedError, match="no Jacobians"):
        tape.jacobian(None, None)
    with pytest.raises(NotImplementedError, match="no Jacobians"):
        tape.batch_jacobian(None, None)


def test_a_scale_that_would_start_anew_with_every_tape_is_refused():
    with pytest.raises(ValueError, match="scale of its own"):
        LossScaleGradientTape("dynamic")
