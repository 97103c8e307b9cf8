"""Gradients of a scaled loss: the same as those of the loss, bit for bit."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import mpx
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from gradscale import DynamicScale, NoScale, OrderError, StateError, StaticScale
from gradscale.jax import (
    current_scale,
    init,
    loss_scaled,
    observe,
    scaled_value_and_grad,
    update,
    value_and_grad,
)

INF = float("inf")
WEIGHTS = jnp.array([0.5, 0.25, -0.75])
BATCH = jnp.array([1.0, -2.0, 4.0])
KEY = jax.random.key(0)
BOTH = pytest.mark.parametrize("differentiate", [value_and_grad, scaled_value_and_grad])


def half_loss(weights, batch):
    """A loss in f16 whose sums and products are all exact there."""
    products = weights.astype(jnp.float16) * batch.astype(jnp.float16)
    return (products * products).astype(jnp.float32).sum()


def full_loss(weights, batch):
    return ((weights * batch) ** 2).sum()


def product(a, b):
    return a * b


def bare(scale=8.0):
    """Return a policy's state with this scale."""
    return init(StaticScale(scale=scale))


# Exactness


@pytest.mark.parametrize("power", [-10, 0, 1, 8, 11])
def test_gradients_equal_those_of_f32_where_f16_is_exact(power):
    loss, grads = value_and_grad(half_loss)(bare(2.0**power), WEIGHTS, BATCH)
    true_loss, true_grads = jax.value_and_grad(full_loss)(WEIGHTS, BATCH)
    assert float(loss) == float(true_loss)
    assert grads.tolist() == true_grads.tolist()


def walk(policy, batches):
    """Return (scale used, loss, gradients) of every step; the weights stay."""
    state, steps = init(policy), []
    for batch in batches:
        loss, grads = stepped(state, WEIGHTS, batch)
        steps.append((float(state.scale), float(loss), grads.tolist()))
        state = update(policy, state, observe(grads))
    return steps


stepped = jax.jit(value_and_grad(half_loss))
BAD = BATCH.at[1].set(INF)


def test_gradients_are_exact_on_and_after_every_growth_step():
    policy = DynamicScale(init_scale=4.0, growth_interval=2, max_scale=2.0**13)
    steps = walk(policy, [BATCH] * 8)
    true_loss, true_grads = jax.value_and_grad(full_loss)(WEIGHTS, BATCH)
    assert [used for used, _, _ in steps] == [4, 4, 8, 8, 16, 16, 32, 32]
    assert {loss for _, loss, _ in steps} == {float(true_loss)}
    assert [grads for _, _, grads in steps] == [true_grads.tolist()] * 8


def test_gradients_are_exact_right_after_a_back_off():
    steps = walk(DynamicScale(init_scale=64.0), [BATCH, BAD, BATCH, BAD, BAD, BATCH])
    true_grads = jax.grad(full_loss)(WEIGHTS, BATCH).tolist()
    assert [used for used, _, _ in steps] == [64, 64, 32, 32, 16, 8]
    good = [steps[place][2] for place in (0, 2, 5)]
    assert good == [true_grads] * 3


def test_mpx_halves_gradients_and_loss_on_a_growth_step_and_we_do_not():
    true_loss, true_grads = jax.value_and_grad(full_loss)(WEIGHTS, BATCH)
    growing = mpx.DynamicLossScaling(jnp.float32(8.0), jnp.float32(1.0), period=1)
    theirs = mpx.filter_value_and_grad(lambda w: half_loss(w, BATCH), growing)
    their_loss, _, finite, their_grads = theirs(WEIGHTS)
    policy = DynamicScale(init_scale=8.0, growth_interval=1)
    ((_, our_loss, our_grads),) = walk(policy, [BATCH])
    assert finite
    assert their_grads.tolist() == (true_grads / 2).tolist()
    assert float(their_loss) == float(true_loss) / 2
    assert our_grads == true_grads.tolist()
    assert our_loss == float(true_loss)


@given(st.floats(2.0**-20, 2.0**20, width=32), st.integers(-40, 100))
def test_f32_gradients_do_not_depend_on_a_power_of_two(weight, power):
    _, grad = squared(bare_like(2.0**power), np.float32(weight))
    assert float(grad) == 2.0 * float(np.float32(weight))


squared = jax.jit(value_and_grad(lambda w: w * w))


def bare_like(scale):
    return np.array(scale, np.float32) * jnp.ones(())


def test_a_gradient_that_f16_cannot_hold_survives():
    def tiny(weight):
        return weight.astype(jnp.float16).astype(jnp.float32) * 1e-8

    assert float(value_and_grad(tiny)(NOTHING, 1.0)[1]) == 0.0
    kept = value_and_grad(tiny)(bare(2.0**15), 1.0)[1]
    assert float(kept) == pytest.approx(1e-8, rel=2.0**-11)


NOTHING = init(NoScale())


# The loss as `fun` made it


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_loss_comes_back_in_its_dtype_with_its_value(differentiate, dtype):
    loss, _ = differentiate(lambda w: w.astype(dtype))(bare(2.0**30), jnp.float32(0.1))
    assert loss.dtype == dtype
    assert float(loss) == float(jnp.float32(0.1).astype(dtype))


@BOTH
def test_a_loss_that_overflows_when_scaled_comes_back_finite(differentiate):
    loss, _ = differentiate(lambda w: w * 1e20)(bare(2.0**100), 1.0)
    assert float(loss) == float(np.float32(1e20))


@BOTH
@pytest.mark.parametrize("bad", [INF, -INF])
def test_a_bad_loss_comes_back_as_it_is(differentiate, bad):
    loss, _ = differentiate(lambda w: w + bad)(bare(), 1.0)
    assert float(loss) == bad


@BOTH
def test_a_loss_that_is_an_integer_is_refused_as_jax_refuses_it(differentiate):
    with pytest.raises(TypeError, match="int32"):
        jax.value_and_grad(lambda w: jnp.int32(3))(1.0)
    with pytest.raises((TypeError, ValueError), match="int32"):
        differentiate(lambda w: jnp.int32(3))(bare(), 1.0)


@BOTH
def test_a_loss_that_is_no_scalar_is_refused(differentiate):
    with pytest.raises(TypeError, match="scalar"):
        differentiate(lambda w: w * 2.0)(bare(), WEIGHTS)


# What `fun` may look like


def test_argnums_may_be_one_number():
    loss, grad = value_and_grad(product, 1)(bare(), 3.0, 5.0)
    assert (float(loss), float(grad)) == (15.0, 3.0)


@pytest.mark.parametrize("argnums", [(0, 1), [0, 1]])
def test_argnums_may_be_several(argnums):
    _, grads = value_and_grad(product, argnums)(bare(), 3.0, 5.0)
    assert tuple(map(float, grads)) == (5.0, 3.0)


def test_argnums_may_be_a_tuple_of_one():
    _, grads = value_and_grad(product, (0,))(bare(), 3.0, 5.0)
    assert isinstance(grads, tuple)
    assert tuple(map(float, grads)) == (5.0,)


def test_argnums_may_count_from_the_end():
    assert float(value_and_grad(product, -1)(bare(), 3.0, 5.0)[1]) == 3.0


@BOTH
def test_aux_comes_back_beside_the_loss(differentiate):
    seen = {"step": 3, "hidden": jnp.arange(2), "name": "text"}
    (loss, aux), _ = differentiate(lambda w: (w * 2.0, seen), has_aux=True)(bare(), 1.5)
    assert float(loss) == 3.0
    assert aux["hidden"].tolist() == [0, 1]
    assert (aux["step"], aux["name"]) == (3, "text")


def test_aux_and_argnums_go_together():
    fun = lambda a, b: (a * b, a)  # noqa: E731
    (loss, aux), grads = value_and_grad(fun, (0, 1), True)(bare(), 3.0, 5.0)
    assert (float(loss), float(aux), *map(float, grads)) == (15.0, 3.0, 5.0, 3.0)


@BOTH
def test_keyword_arguments_reach_the_loss(differentiate):
    fun = lambda w, *, factor, power=1: (w * factor) ** power  # noqa: E731
    loss, _ = differentiate(fun)(bare(), 3.0, factor=2.0, power=2)
    assert float(loss) == 36.0


@BOTH
@pytest.mark.parametrize("name", ["state", "carrier", "args", "kwargs", "fun", "mask"])
def test_a_keyword_argument_of_the_loss_may_have_any_name(differentiate, name):
    fun = lambda w, **given: w * given[name]  # noqa: E731
    assert float(differentiate(fun)(bare(), 3.0, **{name: 2.0})[0]) == 6.0


@BOTH
def test_the_named_argument_of_jit_is_the_one_that_is_static(differentiate):
    jitted = jax.jit(differentiate(lambda w, n: w**n), static_argnames="n")
    assert float(jitted(jnp.float32(8.0), jnp.float32(3.0), n=2)[0]) == 9.0


@BOTH
def test_the_name_and_the_words_of_the_loss_are_kept(differentiate):
    assert differentiate(half_loss).__name__ == "half_loss"
    assert differentiate(half_loss).__doc__ == half_loss.__doc__


@BOTH
@pytest.mark.parametrize(
    "fun",
    [functools.partial(product, 2.0), jax.jit(lambda w: 2.0 * w)],
    ids=["partial", "jitted"],
)
def test_the_loss_may_be_any_callable(differentiate, fun):
    assert float(differentiate(fun)(bare(), 3.0)[0]) == 6.0


def test_gradients_have_the_structure_of_the_parameters():
    params = {"w": jnp.ones(2), "b": [jnp.ones(()), None]}
    _, grads = value_and_grad(lambda p: p["w"].sum() * p["b"][0])(bare(), params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_of_half_parameters_come_back_in_f32(dtype):
    _, grad = value_and_grad(lambda w: w.sum())(bare(), jnp.ones(2, dtype))
    assert (grad.dtype, grad.tolist()) == (jnp.float32, [1.0, 1.0])


def test_a_masked_gradient_is_not_unscaled():
    params = {"w": jnp.ones(()), "amax": jnp.ones(())}
    grads = value_and_grad(
        lambda p: p["w"] + p["amax"], mask={"w": True, "amax": False}
    )(bare(8.0), params)[1]
    assert jax.device_get(grads) == {"w": 1.0, "amax": 8.0}


# Scaled gradients


def test_scaled_gradients_are_those_of_the_scaled_loss():
    loss, grads = scaled_value_and_grad(full_loss)(8.0, WEIGHTS, BATCH)
    true_loss, true_grads = jax.value_and_grad(full_loss)(WEIGHTS, BATCH)
    assert float(loss) == float(true_loss)
    assert grads.tolist() == (8.0 * true_grads).tolist()


def test_scaled_gradients_keep_the_dtype_of_the_parameters():
    _, grad = scaled_value_and_grad(lambda w: w)(2.0**15, jnp.float16(1.0))
    assert (grad.dtype, float(grad)) == (jnp.float16, 2.0**15)


@pytest.mark.parametrize(
    "holder",
    [8, 8.0, np.float32(8.0), np.array(8.0), jnp.float32(8.0), bare(8.0)],
    ids=["int", "float", "np.float32", "ndarray", "array", "state"],
)
@BOTH
def test_anything_that_holds_one_scale_will_do(differentiate, holder):
    factor = 8.0 if differentiate is scaled_value_and_grad else 1.0
    assert float(differentiate(lambda w: w)(holder, 1.0)[1]) == factor


def test_the_scale_is_found_however_deeply_the_optimizer_is_wrapped():
    inner = loss_scaled(optax.sgd(0.1), StaticScale(scale=32.0))
    optimizer = optax.chain(optax.identity(), optax.MultiSteps(inner, 2))
    state = {"opt": (optimizer.init(WEIGHTS), None)}
    assert float(scaled_value_and_grad(lambda w: w)(state, 1.0)[1]) == 32.0


# The wrong carrier


def test_unscaled_gradients_for_an_optimizer_that_unscales_are_refused():
    state = loss_scaled(optax.sgd(0.1), NoScale()).init(WEIGHTS)
    with pytest.raises(OrderError) as caught:
        value_and_grad(full_loss)(state, WEIGHTS, BATCH)
    text = str(caught.value)
    assert "value_and_grad was given a LossScaledState" in text
    assert "unscale them a second time" in text
    assert "Use scaled_value_and_grad" in text
    assert text.endswith("[GS102]")


@pytest.mark.parametrize("carrier", [{"scale": 8.0}, None, "8", (1.0, 2.0)])
def test_what_holds_no_scale_is_refused(carrier):
    with pytest.raises(StateError) as caught:
        scaled_value_and_grad(full_loss)(carrier, WEIGHTS, BATCH)
    text = str(caught.value)
    assert f"There is no state of loss_scaled in this {type(carrier).__name__}" in text
    assert "Pass the result of its init() or update()" in text
    assert text.endswith("[GS302]")


def test_a_state_with_two_scales_is_refused():
    inner = loss_scaled(optax.sgd(0.1), NoScale())
    state = optax.chain(inner, inner).init(WEIGHTS)
    with pytest.raises(StateError, match=r"There are 2 states.*GS302"):
        scaled_value_and_grad(full_loss)(state, WEIGHTS, BATCH)


# Other libraries


def test_equinox_models_are_differentiated():
    model = eqx.nn.MLP(2, "scalar", 3, 1, key=KEY)
    loss_of = lambda m, x: m(x)  # noqa: E731
    ours = value_and_grad(loss_of, using=eqx.filter_value_and_grad)
    loss, grads = ours(bare(2.0**20), model, jnp.ones(2))
    theirs = eqx.filter_value_and_grad(loss_of)(model, jnp.ones(2))
    assert float(loss) == float(theirs[0])
    assert eqx.tree_equal(grads, theirs[1])
    assert grads.activation is None


def test_nnx_models_are_differentiated():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    loss_of = lambda m, x: m(x).sum()  # noqa: E731
    ours = value_and_grad(loss_of, using=nnx.value_and_grad)
    loss, grads = ours(bare(2.0**20), model, jnp.ones((1, 2)))
    true_loss, true_grads = nnx.value_and_grad(loss_of)(model, jnp.ones((1, 2)))
    assert float(loss) == float(true_loss)
    assert jax.tree.structure(grads) == jax.tree.structure(true_grads)
    assert grads["kernel"][...].tolist() == true_grads["kernel"][...].tolist()


def test_what_an_nnx_model_changes_in_itself_is_kept():
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    ours = value_and_grad(lambda m, x: m(x).sum(), using=nnx.value_and_grad)
    ours(bare(2.0**10), model, jnp.full((4, 2), 3.0))
    assert model.mean[...].tolist() == pytest.approx([0.03, 0.03], rel=2.0**-18)


def test_the_scale_of_an_nnx_optimizer_is_found():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    inner = loss_scaled(optax.sgd(0.1), StaticScale(scale=16.0))
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    ours = scaled_value_and_grad(
        lambda m: m(jnp.ones((1, 2))).sum(), using=nnx.value_and_grad
    )
    _, grads = ours(optimizer, model)
    assert float(current_scale(optimizer)) == 16.0
    assert grads["bias"][...].tolist() == [16.0]


def test_argnums_of_a_library_without_them_is_its_own_error():
    ours = value_and_grad(product, 1, using=eqx.filter_value_and_grad)
    with pytest.raises(ValueError, match="argnums"):
        ours(bare(), 3.0, 5.0)
