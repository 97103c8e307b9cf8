"""The same batch again at a lower scale: what it returns, counts and refuses."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from gradscale import ConfigError, DynamicScale, NoScale, StateError, StaticScale
from gradscale.jax import (
    current_scale,
    init,
    last,
    loss_scaled,
    retried_value_and_grad,
)
from tests.jax.halves import as_half

INF, NAN = float("inf"), float("nan")
# Its gradient is 2 in f16, so a scale of 2^14 fits and one of 2^15 does not.
HIGHEST_FIT = 2.0**14


def doubled(weight):
    return (as_half(weight) * jnp.float16(2.0)).astype(jnp.float32)


def attempted(policy, fun=doubled, weight=1.0, **options):
    """Return the loss, the gradient and the state of one batch."""
    tried = retried_value_and_grad(fun, policy, **options)
    return tried(init(policy), jnp.float32(weight))


# When it tries again


def test_a_batch_that_fits_is_tried_once():
    policy = DynamicScale(init_scale=HIGHEST_FIT)
    loss, grad, state = attempted(policy)
    assert (float(loss), float(grad)) == (2.0, 2.0 * HIGHEST_FIT)
    assert state == init(policy)


@pytest.mark.parametrize("power", [15, 16, 18])
def test_the_first_scale_that_fits_is_found(power):
    _, grad, state = attempted(DynamicScale(init_scale=2.0**power))
    assert float(state.scale) == HIGHEST_FIT
    assert float(grad / state.scale) == 2.0


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_no_more_than_the_retries_are_made(retries):
    _, grad, state = attempted(DynamicScale(init_scale=2.0**24), retries=retries)
    assert float(state.scale) == 2.0 ** (24 - retries)
    assert float(grad) == INF


def test_it_does_not_go_below_the_floor():
    policy = DynamicScale(init_scale=2.0**18, min_scale=2.0**17)
    _, grad, state = attempted(policy, retries=9)
    assert float(state.scale) == 2.0**17
    assert float(grad) == INF


@pytest.mark.parametrize("policy", [StaticScale(scale=2.0**20), NoScale()])
def test_a_scale_that_cannot_move_is_tried_once(policy):
    _, _, state = attempted(policy, lambda w: w * INF)
    assert state == init(policy)


def test_a_bad_loss_is_not_tried_again():
    _, grad, state = attempted(DynamicScale(init_scale=8.0), lambda w: w * NAN)
    assert float(state.scale) == 8.0
    assert not jnp.isfinite(grad)


def test_a_bad_gradient_of_a_finite_loss_is_tried_again():
    # The slope of the root at 0 is inf, whatever the scale.
    policy = DynamicScale(init_scale=8.0)
    loss, _, state = attempted(policy, jnp.sqrt, weight=0.0, retries=2)
    assert (float(loss), float(state.scale)) == (0.0, 2.0)


def test_a_forgiven_overflow_is_not_tried_again():
    policy = DynamicScale(init_scale=2.0**18, tolerance=0.1)
    _, grad, state = attempted(policy)
    assert float(state.scale) == 2.0**18
    assert float(grad) == INF


def test_a_masked_gradient_is_not_looked_at():
    policy = DynamicScale(init_scale=2.0**18)
    tried = retried_value_and_grad(doubled, policy, mask=False)
    assert float(tried(init(policy), jnp.float32(1.0))[2].scale) == 2.0**18


# What it returns


def test_the_loss_is_that_of_the_function():
    loss, _, _ = attempted(DynamicScale(), lambda w: w.astype(jnp.float16) * 3)
    assert (loss.dtype, float(loss)) == (jnp.float16, 3.0)


def test_argnums_may_be_several():
    policy = DynamicScale(init_scale=8.0)
    tried = retried_value_and_grad(lambda a, b: a * b, policy, (0, 1))
    _, grads, _ = tried(init(policy), 3.0, 5.0)
    assert tuple(map(float, grads)) == (40.0, 24.0)


def test_aux_is_that_of_the_last_attempt():
    policy = DynamicScale(init_scale=2.0**18)

    def fun(weight):
        return doubled(weight), {"hidden": weight * 3.0, "step": 7}

    (loss, aux), _, _ = attempted(policy, fun, has_aux=True)
    assert (float(loss), float(aux["hidden"]), int(aux["step"])) == (2.0, 3.0, 7)


@pytest.mark.parametrize("key", [jax.random.key(5), jax.random.PRNGKey(5)])
def test_every_attempt_draws_the_same_numbers(key):
    policy = DynamicScale(init_scale=2.0**18)

    def fun(weight, key):
        drawn = jax.random.uniform(key)
        return doubled(weight), (drawn, jax.random.split(key)[0])

    tried = retried_value_and_grad(fun, policy, has_aux=True)
    (_, (drawn, split)), _, state = tried(init(policy), jnp.float32(1.0), key)
    assert float(state.scale) == HIGHEST_FIT
    assert float(drawn) == float(jax.random.uniform(key))
    assert (split == jax.random.split(key)[0]).all()


@pytest.mark.parametrize("name", ["carrier", "state", "policy", "retries"])
def test_a_keyword_argument_of_the_loss_may_have_any_name(name):
    policy = DynamicScale(init_scale=8.0)
    tried = retried_value_and_grad(lambda w, **given: w * given[name], policy)
    assert float(tried(init(policy), 3.0, **{name: 2.0})[0]) == 6.0


def test_the_name_of_the_loss_is_kept():
    assert retried_value_and_grad(doubled, NoScale()).__name__ == "doubled"


def test_a_state_of_plain_numbers_will_do():
    policy = DynamicScale(init_scale=2.0**16)
    tried = retried_value_and_grad(doubled, policy)
    assert float(tried(policy.init_state(), jnp.float32(1.0))[2].scale) == HIGHEST_FIT


def test_gradients_of_f16_parameters_stay_f16_and_scaled():
    policy = DynamicScale(init_scale=2.0**16)
    tried = retried_value_and_grad(doubled, policy)
    _, grad, state = tried(init(policy), jnp.float16(1.0))
    assert (grad.dtype, float(grad)) == (jnp.float16, 2.0 * float(state.scale))


# With an optimizer


def test_the_optimizer_takes_the_step_at_the_scale_that_fits():
    policy = DynamicScale(init_scale=2.0**17)
    optimizer = loss_scaled(optax.sgd(0.25), policy)
    weight = jnp.float32(1.0)
    tried = retried_value_and_grad(doubled, policy)
    loss, grad, state = tried(optimizer.init(weight), weight)
    updates, state = optimizer.update(grad, state, weight, value=loss)
    assert float(updates) == -0.5
    assert bool(last(state).applied)
    assert float(current_scale(state)) == HIGHEST_FIT
    counts = state.applied_steps, state.skipped_steps, state.retried_steps
    assert tuple(map(int, counts)) == (1, 0, 3)


def test_retries_of_several_steps_add_up():
    policy = DynamicScale(init_scale=2.0**15, growth_interval=1)
    optimizer = loss_scaled(optax.sgd(0.25), policy)
    weight, state = jnp.float32(1.0), optimizer.init(jnp.float32(1.0))
    tried = retried_value_and_grad(doubled, policy)
    for _ in range(3):
        _, grad, state = tried(state, weight)
        _, state = optimizer.update(grad, state, weight)
    # Each step fits at 2^14 and grows to 2^15, which the next has to take back.
    assert int(state.retried_steps) == 3
    assert int(state.applied_steps) == 3


def test_an_attempt_that_is_judged_does_not_move_the_state_twice():
    policy = DynamicScale(init_scale=2.0**24)
    optimizer = loss_scaled(optax.sgd(0.25), policy)
    weight = jnp.float32(1.0)
    tried = retried_value_and_grad(doubled, policy, retries=2)
    _, grad, state = tried(optimizer.init(weight), weight)
    assert float(current_scale(state)) == 2.0**22
    _, state = optimizer.update(grad, state, weight)
    assert float(current_scale(state)) == 2.0**21
    assert (int(state.skipped_steps), int(state.retried_steps)) == (1, 2)


def test_the_rest_of_a_wrapped_state_is_left_alone():
    policy = DynamicScale(init_scale=2.0**16)
    optimizer = optax.chain(loss_scaled(optax.adam(0.1), policy), optax.ema(0.5))
    weight = jnp.float32(1.0)
    before = optimizer.init(weight)
    _, _, after = retried_value_and_grad(doubled, policy)(before, weight)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert after[0].inner == before[0].inner
    assert after[1] == before[1]


# Other libraries


def test_an_equinox_model_is_tried_again():
    policy = DynamicScale(init_scale=2.0**18)
    model = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    fun = lambda m: doubled(m(jnp.ones(1))[0])  # noqa: E731
    tried = retried_value_and_grad(fun, policy, using=eqx.filter_value_and_grad)
    _, grads, state = tried(init(policy), model)
    assert float(state.scale) == HIGHEST_FIT
    assert float(grads.bias[0] / state.scale) == 2.0


def test_an_nnx_module_is_refused_with_the_way_out():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    fun = lambda m: m(jnp.ones((1, 1))).sum()  # noqa: E731
    tried = retried_value_and_grad(fun, NoScale(), using=nnx.value_and_grad)
    with pytest.raises(ConfigError) as caught:
        tried(init(NoScale()), model)
    text = str(caught.value)
    assert "was given a Linear, which is a module of nnx" in text
    assert "Pass the state that nnx.split(model) returned" in text
    assert text.endswith("[GS101]")


def test_the_split_state_of_an_nnx_module_is_tried_again():
    policy = DynamicScale(init_scale=2.0**18)
    graph, params = nnx.split(nnx.Linear(1, 1, rngs=nnx.Rngs(0)))

    def fun(params):
        return doubled(nnx.merge(graph, params)(jnp.ones((1, 1)))[0, 0])

    _, grads, state = retried_value_and_grad(fun, policy)(init(policy), params)
    assert float(state.scale) == HIGHEST_FIT
    assert (grads["bias"][...] / state.scale).tolist() == [2.0]


def test_the_state_of_an_nnx_optimizer_will_do():
    policy = DynamicScale(init_scale=2.0**16)
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    inner = loss_scaled(optax.sgd(0.1), policy)
    before = nnx.Optimizer(model, inner, wrt=nnx.Param).opt_state
    graph, params = nnx.split(model)

    def fun(params):
        return doubled(nnx.merge(graph, params)(jnp.ones((1, 1)))[0, 0])

    _, _, after = retried_value_and_grad(fun, policy)(before, params)
    assert float(current_scale(after)) == HIGHEST_FIT
    assert int(after.retried_steps) == 2
    assert jax.tree.structure(after) == jax.tree.structure(before)


# What it refuses


@pytest.mark.parametrize("retries", [-1, True, 1.0, "4", None], ids=repr)
def test_what_is_no_number_of_attempts_is_refused(retries):
    with pytest.raises(ConfigError) as caught:
        retried_value_and_grad(doubled, NoScale(), retries=retries)
    text = str(caught.value)
    assert f"retries={retries!r} is not a number of attempts." in text
    assert "The loop must end" in text
    assert "Pass a whole number, 0 or more." in text
    assert text.endswith("[GS101]")


@pytest.mark.parametrize("carrier", [8.0, None, {"scale": 8.0}], ids=repr)
def test_what_holds_no_state_is_refused(carrier):
    with pytest.raises(StateError) as caught:
        retried_value_and_grad(doubled, NoScale())(carrier, jnp.float32(1.0))
    text = str(caught.value)
    assert f"There is no state of loss_scaled in this {type(carrier).__name__}" in text
    assert text.endswith("[GS302]")


def test_a_state_with_two_scales_is_refused():
    half = loss_scaled(optax.sgd(0.1), NoScale())
    state = optax.chain(half, half).init(jnp.ones(()))
    with pytest.raises(StateError, match=r"There are 2 states of loss_scaled.*GS302"):
        retried_value_and_grad(doubled, NoScale())(state, jnp.float32(1.0))
