"""State and configuration: saved, loaded, exchanged with Keras' own class."""

import functools
import json
import random

import keras
import numpy as np
import pytest
from keras import ops

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.errors import ConfigError, StateError
from gradscale.keras import LossScaleOptimizer, loss_scaled
from tests.keras.backends.steps import INF, made, state, stepped, values

KERAS = keras.optimizers.LossScaleOptimizer
# XLA may divide by a scale or multiply by its inverse: the same for a power of two.
SCALE = 1024.0 if keras.backend.backend() == "jax" else 1000.0


def trained(kind, variables, grads, saved=None):
    """Take steps with an optimizer of a class, from a saved state if there is one."""
    optimizer = kind(keras.optimizers.Adam(0.1), SCALE, dynamic_growth_steps=3)
    optimizer.build(variables)
    if saved is not None:
        optimizer.load_own_variables(saved)
    for grad in grads:
        take(optimizer, variables, ops.convert_to_tensor(grad))
    return optimizer


def take(optimizer, variables, grad):
    """Take one step by the way that Keras' own class has on this backend."""
    if keras.backend.backend() != "jax":
        optimizer.apply([grad], variables)
        return
    new, inside = compiled(optimizer)(
        [v.value for v in optimizer.variables], [grad], [v.value for v in variables]
    )
    for variable, value in zip(variables, new, strict=True):
        variable.assign(value)
    for variable, value in zip(optimizer.variables, inside, strict=True):
        variable.assign(value)


@functools.cache
def compiled(optimizer):
    """Return `stateless_apply` as `fit` runs it: XLA rounds a compiled step once."""
    import jax

    return jax.jit(optimizer.stateless_apply)


def random_grads(count, share=0.2):
    rng = random.Random(count)
    return [
        np.array([rng.gauss(0, 500), INF if rng.random() < share else 1.0], "float32")
        for _ in range(count)
    ]


OTHER = {LossScaleOptimizer: KERAS, KERAS: LossScaleOptimizer}


@pytest.mark.parametrize("kind", OTHER, ids=["ours to Keras", "Keras to ours"])
def test_a_state_loads_into_the_other_class_and_goes_on_bit_for_bit(kind):
    grads = random_grads(30)
    weight, copy = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    first = trained(kind, [weight], grads[:17])
    saved = {}
    first.save_own_variables(saved)
    copy.assign(weight.value)
    second = trained(OTHER[kind], [copy], [], saved)
    for grad in grads[17:]:
        take(first, [weight], ops.convert_to_tensor(grad))
        take(second, [copy], ops.convert_to_tensor(grad))
        assert values([weight]) == values([copy])
        assert state(first) == state(second)


@pytest.mark.parametrize("kind", OTHER, ids=["ours to Keras", "Keras to ours"])
def test_a_configuration_makes_the_other_class(kind):
    inner = keras.optimizers.Adam(0.25, clipnorm=1.0)
    config = kind(inner, 64.0, 7, name="scaled").get_config()
    other = OTHER[kind].from_config(json.loads(json.dumps(config)))
    assert isinstance(other, OTHER[kind])
    assert (other.initial_scale, other.dynamic_growth_steps) == (64.0, 7)
    assert other.name == "scaled"
    assert float(other.inner_optimizer.clipnorm) == 1.0
    assert other.get_config() == config


def test_the_configuration_has_the_keys_of_keras():
    inner = keras.optimizers.SGD(0.5)
    ours, keras_own = LossScaleOptimizer(inner, name="o"), KERAS(inner, name="o")
    assert ours.get_config() == keras_own.get_config()


@pytest.mark.parametrize(
    "policy",
    [
        NoScale(),
        StaticScale(scale=64.0),
        DynamicScale(growth_factor=4.0, min_scale=1.0, tolerance=0.125),
    ],
    ids=str,
)
def test_a_policy_survives_its_configuration(policy):
    config = LossScaleOptimizer(keras.optimizers.SGD(0.5), policy=policy).get_config()
    assert set(config) == {"name", "inner_optimizer", "policy"}
    made_again = LossScaleOptimizer.from_config(json.loads(json.dumps(config)))
    assert made_again.policy == policy


def test_a_policy_that_this_version_does_not_have_is_an_error():
    config = LossScaleOptimizer(keras.optimizers.SGD(0.5)).get_config()
    config["policy"] = {"kind": "HyperScale"}
    with pytest.raises(ConfigError, match="names the policy 'HyperScale'"):
        LossScaleOptimizer.from_config(config)


def test_counts_are_not_in_the_saved_state():
    optimizer, variables = made()
    before = len(state(optimizer))
    stepped(optimizer, variables, [INF, 1.0])
    keras_own = KERAS(keras.optimizers.SGD(0.5))
    keras_own.build([keras.Variable([1.0, 2.0])])
    assert before == len(state(optimizer)) == len(keras_own.variables)


def test_a_tolerance_saves_its_debt_and_resumes_bit_for_bit():
    policy = DynamicScale(init_scale=64.0, tolerance=0.25)
    optimizer, variables = made(policy=policy)
    stepped(optimizer, variables, [INF, 1.0])
    saved = {}
    optimizer.save_own_variables(saved)
    other, others = made(policy=policy)
    other.load_own_variables(saved)
    stepped(optimizer, variables, [INF, 1.0])
    stepped(other, others, [INF, 1.0])
    assert optimizer.scale == other.scale == 32.0


@pytest.mark.parametrize("scale", [0.0, INF, float("nan"), 2.0**-30])
def test_a_saved_scale_outside_the_bounds_is_an_error_and_loads_nothing(scale):
    optimizer, variables = made(keras.optimizers.Adam(0.1))
    stepped(optimizer, variables, [1.0, 1.0])
    saved = {}
    optimizer.save_own_variables(saved)
    place = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True)
    saved = {name: np.zeros_like(value) for name, value in saved.items()}
    saved[str(place)] = np.float32(scale)
    before = state(optimizer)
    with pytest.raises(StateError, match="outside"):
        optimizer.load_own_variables(saved)
    assert state(optimizer) == before


def test_a_state_of_another_size_is_not_loaded_and_keras_warning_is_given():
    optimizer, _ = made()
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        optimizer.load_own_variables({"0": np.zeros(())})


# --- files ----------------------------------------------------------------------------


EAGERLY = keras.backend.backend() == "tensorflow"


def small_model(optimizer):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    # A function of TensorFlow takes a second to trace.
    model.compile(optimizer=optimizer, loss="mse", run_eagerly=EAGERLY)
    return model


X = np.random.RandomState(0).randn(32, 3).astype("float32")
Y = X[:, :2]


def test_a_saved_model_goes_on_bit_for_bit(tmp_path):
    model = small_model(LossScaleOptimizer(keras.optimizers.Adam(0.1), 2.0**10, 3))
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert state(loaded.optimizer) == state(model.optimizer)
    for either in (model, loaded):
        either.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    assert values(loaded.weights) == values(model.weights)
    assert loaded.optimizer.scale == model.optimizer.scale == 2.0**12


def test_a_model_file_names_our_class(tmp_path):
    model = small_model(LossScaleOptimizer(keras.optimizers.Adam(0.1)))
    config = keras.saving.serialize_keras_object(model.optimizer)
    assert config["registered_name"] == "gradscale>LossScaleOptimizer"


def test_weights_of_a_model_compiled_with_keras_own_load(tmp_path):
    model = small_model(KERAS(keras.optimizers.Adam(0.1), 2.0**10, 3))
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    model.save_weights(tmp_path / "all.weights.h5")
    other = small_model(LossScaleOptimizer(keras.optimizers.Adam(0.1), 2.0**10, 3))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "all.weights.h5")
    assert state(other.optimizer) == state(model.optimizer)


def test_a_model_saved_with_keras_own_is_converted(tmp_path):
    model = small_model(KERAS(keras.optimizers.Adam(0.1), 2.0**10, 3))
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    optimizer = loss_scaled(loaded.optimizer)
    loaded.compile(optimizer=optimizer, loss="mse", run_eagerly=EAGERLY)
    assert type(loaded.optimizer) is LossScaleOptimizer
    for either in (model, loaded):
        either.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False)
    assert values(loaded.weights) == values(model.weights)
    assert state(loaded.optimizer) == state(model.optimizer)
