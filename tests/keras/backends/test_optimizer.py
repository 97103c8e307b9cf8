"""The optimizer step by step, the same on every backend."""

import keras
import numpy as np
import pytest
from keras import ops

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.errors import ConfigError, GradientError, StateError
from gradscale.keras import LossScaleOptimizer
from tests.keras.backends.steps import BACKEND, INF, NAN, made, stepped, values

# --- a step ---------------------------------------------------------------------------


def test_a_finite_step_is_applied_with_unscaled_gradients():
    optimizer, variables = made(initial_scale=8.0)
    stepped(optimizer, variables, [8.0, 16.0])
    assert values(variables) == [[0.5, 1.0]]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_step_that_is_not_finite_is_skipped(bad):
    optimizer, variables = made()
    stepped(optimizer, variables, [1.0, bad])
    assert values(variables) == [[1.0, 2.0]]
    assert optimizer.scale == 2.0**14


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("place", [0, 499, 999])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_one_bad_element_anywhere_skips_the_step(bad, place, dtype):
    optimizer, variables = made(variables=[np.ones(1000)])
    grad = np.zeros(1000, "float32")
    grad[place] = bad
    optimizer.apply([ops.cast(grad, dtype)], variables)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (0, 1)


def test_a_skipped_step_leaves_the_inner_optimizer_alone():
    inner = keras.optimizers.Adam(0.1)
    optimizer, variables = made(inner)
    stepped(optimizer, variables, [1.0, 1.0])
    before = values(inner.variables)
    stepped(optimizer, variables, [1.0, INF])
    assert values(inner.variables) == before
    assert int(optimizer.iterations) == 1


def test_the_step_that_grows_the_scale_is_unscaled_by_the_scale_of_its_loss():
    optimizer, variables = made(initial_scale=8.0, dynamic_growth_steps=1)
    stepped(optimizer, variables, [8.0, 8.0])
    assert values(variables) == [[0.5, 1.5]]
    assert optimizer.scale == 16.0


def test_a_gradient_that_becomes_infinite_when_it_is_unscaled_skips_the_step():
    policy = DynamicScale(init_scale=2.0**-20)
    optimizer, variables = made(policy=policy)
    stepped(optimizer, variables, [2.0**120, 1.0])
    assert values(variables) == [[1.0, 2.0]]
    assert optimizer.last.culprits == ("a",)


def test_gradients_of_large_magnitude_whose_sum_overflows_are_finite():
    policy = DynamicScale(init_scale=2.0**100)
    optimizer, variables = made(policy=policy, variables=[np.zeros(64)])
    stepped(optimizer, variables, np.full(64, 2.0**127))
    assert optimizer.applied_steps == 1
    assert values(variables) == [[-(2.0**26)] * 64]


def test_half_precision_gradients_are_unscaled_in_float32():
    optimizer, variables = made(keras.optimizers.SGD(1.0), variables=[[0.0]])
    optimizer.apply([ops.cast([2.0**-13], "float16")], variables)
    assert values(variables) == [[-(2.0**-28)]]


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 by default")
def test_float64_gradients_are_read_and_unscaled_in_float64():
    weight = keras.Variable([0.0], dtype="float64")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0)
    optimizer.apply([ops.convert_to_tensor(np.array([2.0 + 2.0**-40]))], [weight])
    assert values([weight]) == [[-1.0 - 2.0**-41]]
    optimizer.apply([ops.convert_to_tensor(np.array([1e200]))], [weight])
    assert optimizer.last.applied
    optimizer.apply([ops.convert_to_tensor(np.array([NAN]))], [weight])
    assert not optimizer.last.applied


def test_an_empty_gradient_counts_as_zero():
    optimizer, variables = made(variables=[np.zeros((0, 2)), [1.0]])
    stepped(optimizer, variables, np.zeros((0, 2)), [2.0**15])
    assert values(variables) == [[], [0.5]]


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_a_variable_without_gradient_is_left_alone():
    optimizer, variables = made(variables=[[1.0], [1.0]])
    optimizer.apply([None, ops.convert_to_tensor([2.0**15])], variables)
    assert values(variables) == [[1.0], [0.5]]


def test_no_gradient_at_all_is_an_error_as_in_keras():
    optimizer, variables = made()
    with pytest.raises(GradientError, match="No gradients provided") as caught:
        optimizer.apply([None], variables)
    assert isinstance(caught.value, ValueError)


def test_gradients_without_variables_need_an_optimizer_that_is_built():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    with pytest.raises(StateError, match="no variables yet"):
        optimizer.apply([ops.ones(2)])


def test_a_complex_gradient_keeps_its_imaginary_part():
    weight = keras.Variable(np.array([1.0 + 1.0j, 2.0]), dtype="complex64")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    optimizer.build([weight])
    for grad in ([8.0 + 8.0j, 16.0], [8.0, complex(0.0, NAN)]):
        grad = ops.convert_to_tensor(np.array(grad, "complex64"))
        optimizer.apply([grad], [weight])
    assert values([weight]) == [[0.5 + 0.5j, 1.0]]
    assert optimizer.skipped_steps == 1


def test_a_wrong_number_of_gradients_is_an_error():
    optimizer, _ = made(variables=[[1.0], [1.0]])
    with pytest.raises(GradientError, match="1 gradients for 2 variables"):
        optimizer.apply([ops.ones(1)])


def test_an_empty_list_of_gradients_does_nothing():
    optimizer, _ = made()
    optimizer.apply([])
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (0, 0)


def test_a_step_may_be_for_some_of_the_variables():
    optimizer, variables = made(variables=[[1.0], [1.0]])
    stepped(optimizer, variables[1:], [2.0**15])
    assert values(variables) == [[1.0], [0.5]]
    stepped(optimizer, variables[1:], [INF])
    assert optimizer.last.culprits == ("b",)


def test_an_unknown_variable_is_an_error():
    optimizer, _ = made()
    with pytest.raises(ValueError, match="Unknown variable"):
        stepped(optimizer, [keras.Variable([1.0, 1.0])], [1.0, 1.0])


def test_sparse_gradients_are_read_and_unscaled():
    if BACKEND == "torch":
        pytest.skip("Keras has no sparse gradients on the torch backend")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(4, 2)])
    weight = model.trainable_variables[0]
    weight.assign(np.ones((4, 2)))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer.build([weight])
    optimizer.apply([_rows([1], [[4.0, 8.0]])], [weight])
    assert values([weight]) == [[[1.0, 1.0], [0.0, -1.0], [1.0, 1.0], [1.0, 1.0]]]
    optimizer.apply([_rows([1], [[4.0, NAN]])], [weight])
    assert optimizer.skipped_steps == 1


def _rows(indices, data):
    """Return a sparse gradient of shape (4, 2)."""
    data = np.array(data, "float32")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.IndexedSlices(tf.constant(data), tf.constant(indices), (4, 2))
    from jax.experimental.sparse import BCOO

    return BCOO((data, np.array(indices)[:, None]), shape=(4, 2))


# --- what belongs to the inner optimizer ----------------------------------------------


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ({"clipnorm": 1.0}, [-0.6, -0.8]),
        ({"global_clipnorm": 1.0}, [-0.6, -0.8]),
        ({"clipvalue": 3.5}, [-3.0, -3.5]),
    ],
)
def test_clipping_sees_unscaled_gradients(clip, expected):
    inner = keras.optimizers.SGD(1.0, **clip)
    optimizer, variables = made(inner, variables=[[0.0, 0.0]], initial_scale=1024.0)
    stepped(optimizer, variables, [3.0 * 1024, 4.0 * 1024])
    assert np.allclose(values(variables)[0], expected, rtol=1e-6)


def test_accumulated_gradients_are_unscaled_each_by_the_scale_of_its_loss():
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer, variables = made(
        inner, variables=[[0.0]], initial_scale=8.0, dynamic_growth_steps=1
    )
    stepped(optimizer, variables, [8.0])
    assert values(variables) == [[0.0]]
    stepped(optimizer, variables, [16.0 * 3.0])
    assert values(variables) == [[-2.0]]


def test_a_skipped_micro_step_is_left_out_of_the_accumulation():
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer, variables = made(inner, variables=[[0.0]], initial_scale=8.0)
    stepped(optimizer, variables, [8.0])
    stepped(optimizer, variables, [NAN])
    assert values(variables) == [[0.0]]
    stepped(optimizer, variables, [4.0 * 3.0])
    assert values(variables) == [[-2.0]]


def test_averages_of_the_weights_ignore_skipped_steps():
    inner = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer, variables = made(inner, variables=[[0.0]], initial_scale=8.0)
    stepped(optimizer, variables, [8.0])
    stepped(optimizer, variables, [INF])
    stepped(optimizer, variables, [4.0])
    assert values(variables) == [[-2.0]]
    assert values(inner._model_variables_moving_average) == [[-1.5]]
    optimizer.finalize_variable_values(variables)
    assert values(variables) == [[-1.5]]


def test_a_variable_that_is_overwritten_gets_its_gradient_as_it_is():
    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    variables[0].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
    optimizer.build(variables)
    stepped(optimizer, variables, [7.0], [4.0])
    assert values(variables) == [[7.0], [0.5]]
    # It is not a scaled gradient.
    assert optimizer.last.amax == 4.0


def test_a_multi_optimizer_can_be_wrapped_and_cannot_wrap():
    inner = keras.optimizers.MultiOptimizer(lambda v: keras.optimizers.SGD(0.5))
    optimizer, variables = made(inner, initial_scale=8.0)
    stepped(optimizer, variables, [8.0, 16.0])
    assert values(variables) == [[0.5, 1.0]]
    outer = keras.optimizers.MultiOptimizer(
        lambda v: LossScaleOptimizer(keras.optimizers.SGD(0.5))
    )
    with pytest.raises(ValueError, match="LossScaleOptimizer cannot be used inside"):
        outer.build(variables)


@pytest.mark.parametrize(
    "kind", [LossScaleOptimizer, keras.optimizers.LossScaleOptimizer]
)
def test_a_wrapped_optimizer_cannot_be_wrapped_again(kind):
    # With Keras' own class the gradients are unscaled twice.
    inner = kind(keras.optimizers.SGD(0.5))
    with pytest.raises(ConfigError, match="gradients unscaled twice"):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize("inner", ["adam", None])
def test_an_inner_optimizer_that_is_none_is_refused(inner):
    with pytest.raises(ConfigError, match="needs an optimizer of Keras"):
        LossScaleOptimizer(inner)


def test_an_inner_loss_scale_factor_is_cleared():
    inner = keras.optimizers.SGD(0.5, loss_scale_factor=100.0)
    optimizer, variables = made(inner, initial_scale=8.0)
    stepped(optimizer, variables, [8.0, 16.0])
    assert values(variables) == [[0.5, 1.0]]


# --- the loss -------------------------------------------------------------------------


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_loss_is_scaled_in_float32(built, dtype):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    if built:
        optimizer.build([keras.Variable([1.0])])
    scaled = optimizer.scale_loss(ops.cast(4.0, dtype))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(scaled) == 4.0 * 2.0**15


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no float64 by default")
def test_a_loss_of_float64_stays_so():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    scaled = optimizer.scale_loss(ops.cast(4.0, "float64"))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float64"


def test_a_python_number_can_be_scaled():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    assert float(optimizer.scale_loss(1.5)) == 12.0


# --- policies -------------------------------------------------------------------------


def test_the_scale_never_becomes_zero():
    optimizer, variables = made(initial_scale=2.0**-20)
    for _ in range(6):
        stepped(optimizer, variables, [INF, 1.0])
    assert optimizer.scale == 2.0**-24
    stepped(optimizer, variables, [2.0**-24, 2.0**-24])
    assert values(variables) == [[0.5, 1.5]]


def test_the_scale_never_becomes_infinite():
    optimizer, variables = made(initial_scale=2.0**124, dynamic_growth_steps=1)
    for _ in range(4):
        stepped(optimizer, variables, [0.0, 0.0])
    assert optimizer.scale == 2.0**126
    stepped(optimizer, variables, [2.0**126, 0.0])
    assert values(variables) == [[0.5, 2.0]]


def test_a_static_scale_skips_and_stays():
    optimizer, variables = made(policy=StaticScale(scale=4.0))
    stepped(optimizer, variables, [4.0, 4.0])
    stepped(optimizer, variables, [4.0, NAN])
    assert values(variables) == [[0.5, 1.5]]
    assert optimizer.scale == 4.0
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (1, 1)


def test_without_a_scale_steps_that_are_not_finite_are_skipped():
    optimizer, variables = made(policy=NoScale())
    assert float(optimizer.scale_loss(3.0)) == 3.0
    stepped(optimizer, variables, [1.0, 1.0])
    stepped(optimizer, variables, [INF, 1.0])
    assert values(variables) == [[0.5, 1.5]]


def test_a_tolerance_forgives_an_overflow():
    policy = DynamicScale(init_scale=8.0, tolerance=0.25)
    optimizer, variables = made(policy=policy)
    stepped(optimizer, variables, [INF, 1.0])
    assert optimizer.scale == 8.0
    stepped(optimizer, variables, [INF, 1.0])
    assert optimizer.scale == 4.0


def test_the_settings_of_a_policy_are_read_by_keras_names():
    policy = DynamicScale(init_scale=4.0, growth_interval=7)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=policy)
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (4.0, 7)


def test_settings_that_can_never_work_are_errors():
    inner = keras.optimizers.SGD(0.5)
    with pytest.raises(ConfigError, match="'adam' is a str"):
        LossScaleOptimizer(inner, policy="adam")
    with pytest.raises(ConfigError, match="passed together with a policy"):
        LossScaleOptimizer(inner, 8.0, policy=NoScale())
    with pytest.raises(ConfigError, match="above 8"):
        LossScaleOptimizer(inner, policy=StaticScale(scale=2.0**127))
    for scale in (0.0, -1.0, INF, NAN, 2.0**127):
        with pytest.raises(ValueError, match=r"init_scale=.* is outside"):
            LossScaleOptimizer(inner, initial_scale=scale)
    for steps in (0, 1.5, 2**31):
        with pytest.raises(ValueError, match="growth_interval="):
            LossScaleOptimizer(inner, dynamic_growth_steps=steps)
    with pytest.raises(ValueError, match="set `loss_scale_factor` directly"):
        LossScaleOptimizer(inner, dynamic=False)


# --- what became of it ----------------------------------------------------------------


def test_the_outcome_of_a_step_can_be_read():
    optimizer, variables = made(variables=[[1.0, 2.0], [3.0]])
    stepped(optimizer, variables, [-3.0, 1.0], [2.0])
    last = optimizer.last
    assert (last.step, last.scale, last.applied, last.amax) == (1, 2.0**15, True, 3.0)
    assert (str(last.verdict), last.culprits) == ("ok", ())
    stepped(optimizer, variables, [1.0, 1.0], [NAN])
    assert not optimizer.last.applied
    assert optimizer.last.record.nan
    assert optimizer.last.culprits == ("b",)
    # The earlier one is still that of its step.
    assert last.applied


def test_the_first_steps_that_overflow_are_calibrating():
    optimizer, variables = made()
    stepped(optimizer, variables, [INF, 1.0])
    assert str(optimizer.last.verdict) == "calibrating"
    assert not optimizer.last.record.nan
    stepped(optimizer, variables, [1.0, 1.0])
    stepped(optimizer, variables, [INF, 1.0])
    assert str(optimizer.last.verdict) == "overflow"


def test_an_overflow_after_growth_is_probing():
    optimizer, variables = made(dynamic_growth_steps=1)
    stepped(optimizer, variables, [1.0, 1.0])
    stepped(optimizer, variables, [INF, 1.0])
    assert str(optimizer.last.verdict) == "probing"


def test_three_skips_at_the_floor_are_a_collapse():
    policy = DynamicScale(init_scale=2.0, min_scale=1.0)
    optimizer, variables = made(policy=policy)
    verdicts = []
    for _ in range(4):
        stepped(optimizer, variables, [INF, 1.0])
        verdicts.append(str(optimizer.last.verdict))
    assert verdicts[-2:] == ["calibrating", "collapse"]


def test_an_optimizer_without_variables_has_no_outcome():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    assert (optimizer.applied_steps, optimizer.scale) == (0, 2.0**15)
    with pytest.raises(StateError, match="no variables yet"):
        _ = optimizer.last
    optimizer.build([keras.Variable([1.0])])
    assert (optimizer.last.step, optimizer.last.scale) == (0, 2.0**15)


# --- stateless ------------------------------------------------------------------------


def test_stateless_apply_gives_what_apply_does():
    optimizer, variables = made(keras.optimizers.Adam(0.1))
    if BACKEND == "tensorflow":
        with pytest.raises(ValueError, match="not supported with the TensorFlow"):
            optimizer.stateless_apply([], [], [])
        return
    other, others = made(keras.optimizers.Adam(0.1))
    trained = [v.value for v in others]
    inside = [v.value for v in other.variables]
    for grad in ([1.0, 2.0], [INF, 1.0], [3.0, 1.0]):
        stepped(optimizer, variables, grad)
        trained, inside = other.stateless_apply(
            inside, [ops.convert_to_tensor(grad)], trained
        )
    assert [ops.convert_to_numpy(v).tolist() for v in trained] == values(variables)
    found = [ops.convert_to_numpy(v).tolist() for v in inside]
    assert found == values(optimizer.variables)
    if BACKEND == "jax":
        # Keras' optimizers of the torch backend work in place.
        assert values(others) == [[1.0, 2.0]]
