"""Scale, unscale, select, and the move from one state to the next."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale import (
    ConfigError,
    DynamicScale,
    GradientError,
    NoScale,
    StateError,
    StaticScale,
)
from gradscale.core.state import PYTHON, Observed
from gradscale.jax import (
    init,
    loss_scaled,
    observe,
    scale,
    select,
    unscale,
    update,
)
from tests.strategies import POLICIES, TRACES

INF, NAN = float("inf"), float("nan")
scaled = jax.jit(scale)
unscaled = jax.jit(unscale)
moved = jax.jit(update, static_argnums=0)


def bits(array):
    """Return the bit patterns of an array, so that -0.0 and NaN compare."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}").tolist()


# scale


def test_an_f16_loss_is_scaled_in_f32():
    loss = scale(jnp.float16(3.0), 2.0**16)
    assert (loss.dtype, float(loss)) == (jnp.float32, 196608.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2, jnp.float32])
def test_a_scaled_loss_is_f32(dtype):
    assert scale(jnp.ones((), dtype), 8.0).dtype == jnp.float32


def test_every_loss_of_a_tree_is_scaled():
    losses = scale({"a": jnp.float16(1.0), "b": [2.0]}, 4.0)
    assert jax.device_get(losses) == {"a": 4.0, "b": [8.0]}


@pytest.mark.parametrize("loss", [7, True, jnp.int32(7), jnp.ones((), bool)])
def test_a_loss_without_a_derivative_is_refused(loss):
    with pytest.raises(GradientError, match=r"loss.*(int|bool).*float.*\[GS"):
        scale(loss, 8.0)


def test_no_scale_leaves_the_loss_as_it_is():
    assert float(scale(jnp.float32(0.1), init(NoScale()))) == float(np.float32(0.1))


# unscale


def test_unscale_casts_before_it_divides():
    held = jnp.float16(2e-4)
    freed = unscale(held, 2.0**15)
    assert freed.dtype == jnp.float32
    assert float(freed) == float(held) / 2.0**15
    assert float(held / jnp.float16(2.0**15)) == 0.0


@pytest.mark.parametrize(
    "dtype",
    [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32],
)
def test_unscaled_gradients_are_f32(dtype):
    freed = unscale({"w": jnp.full(2, 3.0, dtype)}, 2.0)
    assert freed["w"].dtype == jnp.float32
    assert freed["w"].tolist() == [1.5, 1.5]


def test_complex_gradients_stay_complex():
    freed = unscale(jnp.array([4.0 - 8.0j]), 4.0)
    assert (freed.dtype, freed.tolist()) == (jnp.complex64, [1.0 - 2.0j])


def test_unscale_divides_an_f64_in_f64():
    with jax.enable_x64(True):
        freed = unscale(jnp.array([1e300]), 2.0**10)
        assert (freed.dtype, float(freed[0])) == (jnp.float64, 1e300 / 2.0**10)


POWERS = st.integers(-60, 60)
# Magnitudes for which neither the product nor the quotient leaves the normal f32.
VALUES = st.just(0.0) | st.just(-0.0) | st.floats(2.0**-60, 2.0**60, width=32)
SIGNED = VALUES | VALUES.map(lambda value: -value)


@given(st.lists(SIGNED, min_size=8, max_size=8), POWERS)
def test_unscale_undoes_scale_bit_for_bit_for_powers_of_two(values, power):
    array = np.array(values, np.float32)
    factor = np.float32(2.0**power)
    assert bits(unscaled(scaled(array, factor), factor)) == bits(array)


@given(st.integers(0, 0x7BFF), st.integers(-112, 126), st.booleans())
def test_every_f16_survives_unscaling_exactly(pattern, power, negative):
    held = np.array([pattern + 0x8000 * negative], np.uint16).view(np.float16)
    exact = float(held[0]) / 2.0**power
    if exact and not 2.0**-126 <= abs(exact) < 2.0**128:
        return
    assert float(unscaled(held, np.float32(2.0**power))[0]) == exact


@pytest.mark.parametrize("highest", [2.0**126, 2.0**-126])
def test_unscaling_is_exact_at_the_ends_of_what_init_allows(highest):
    freed = unscale(jnp.float32(1.0), StaticScale(scale=highest).init_state())
    assert float(freed) == 1.0 / highest


def test_unscale_keeps_none_where_nothing_is_trained():
    freed = unscale({"a": None, "b": jnp.ones(2)}, 2.0)
    assert freed["a"] is None


@pytest.mark.parametrize(
    "leaf",
    [jnp.array([NAN, INF]), jnp.arange(2), np.zeros(2, jax.dtypes.float0), "word"],
    ids=["bad", "integer", "float0", "text"],
)
def test_a_masked_leaf_is_returned_as_it_is(leaf):
    grads = {"state": leaf, "w": jnp.full(2, 8.0)}
    freed = unscale(grads, 8.0, mask={"state": False, "w": True})
    assert freed["state"] is leaf
    assert freed["w"].tolist() == [1.0, 1.0]


def test_unscale_refuses_an_integer_gradient():
    with pytest.raises(GradientError, match=r"The gradient of w is int32.*GS106"):
        unscale({"w": jnp.arange(2)}, 8.0)


def test_unscale_refuses_a_mask_of_another_structure():
    with pytest.raises(ConfigError, match=r"mask does not fit.*GS101"):
        unscale({"w": jnp.ones(2)}, 8.0, mask=[True])


def test_unscale_takes_the_scale_from_an_optimizer():
    optimizer = loss_scaled(optax.sgd(1.0), StaticScale(scale=4.0))
    state = optimizer.init(jnp.ones(1))
    assert unscale(jnp.full(1, 8.0), state).tolist() == [2.0]


@pytest.mark.parametrize("multiply", [scale, unscale])
def test_what_holds_no_scale_is_refused(multiply):
    with pytest.raises(StateError, match="no state of loss_scaled in this str"):
        multiply(jnp.ones(1), "8.0")


# update


@given(POLICIES.filter(lambda policy: policy.max_scale <= 2.0**126), TRACES)
def test_update_moves_the_state_as_the_definition_does(policy, trace):
    here, there = init(policy), policy.init_state()
    for finite in trace[:6]:
        here = update(policy, here, finite)
        there = policy.next_state(there, Observed(finite, 1.0, True), PYTHON.where)
    assert [value.item() for value in here] == list(there)


def test_update_takes_what_observe_returned():
    policy = DynamicScale(init_scale=8.0, growth_interval=1)
    assert float(update(policy, init(policy), observe(jnp.ones(2))).scale) == 16.0
    assert float(update(policy, init(policy), observe(jnp.array(NAN))).scale) == 4.0


def test_update_takes_what_a_rule_takes():
    policy = DynamicScale(init_scale=8.0)
    seen = Observed(jnp.array(False), jnp.float32(INF), jnp.array(True))
    assert float(update(policy, init(policy), seen).scale) == 4.0


@pytest.mark.parametrize("policy", [NoScale(), StaticScale(scale=3.0)])
def test_a_fixed_scale_stays(policy):
    assert update(policy, init(policy), False) == init(policy)


def test_a_state_keeps_its_dtypes_when_it_moves():
    policy = DynamicScale(growth_interval=1)
    state = moved(policy, init(policy), True)
    kinds = [(value.dtype.name, value.weak_type) for value in state]
    assert kinds == [("float32", False), ("int32", False), ("int32", False)]


# select


@pytest.mark.parametrize(("applied", "kept"), [(True, 1.0), (False, 2.0)])
def test_select_takes_the_new_tree_if_the_step_is_applied(applied, kept):
    new, old = {"a": jnp.float32(1.0)}, {"a": jnp.float32(2.0)}
    assert float(select(jnp.array(applied), new, old)["a"]) == kept


def test_select_returns_the_old_bits_on_a_skip():
    old = np.array([-0.0, NAN, INF, 1e-20], np.float32)
    assert bits(select(jnp.array(False), jnp.full(4, NAN), old)) == bits(old)


def test_select_keeps_the_dtype_of_the_old_tree():
    new, old = jnp.ones(1, jnp.float32), jnp.ones(1, jnp.bfloat16)
    assert select(jnp.array(True), new, old).dtype == jnp.bfloat16


def test_select_takes_prng_keys():
    new, old = jax.random.key(1), jax.random.key(2)
    assert select(jnp.array(False), new, old) == old
    assert select(jnp.array(True), new, old) == new


def test_select_never_lets_a_bad_new_value_through():
    old = {"a": jnp.ones(3), "b": None, "c": jnp.int32(4)}
    new = {"a": jnp.full(3, NAN), "b": None, "c": jnp.int32(5)}
    kept = jax.device_get(select(jnp.array(False), new, old))
    assert kept["a"].tolist() == [1.0, 1.0, 1.0]
    assert (kept["b"], int(kept["c"])) == (None, 4)


def test_select_refuses_trees_of_different_structure():
    with pytest.raises(ValueError, match=r"key|structure|arity"):
        select(jnp.array(True), {"a": jnp.ones(1)}, {"b": jnp.ones(1)})
