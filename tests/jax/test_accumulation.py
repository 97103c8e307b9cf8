"""Micro-batches whose sum may overflow: `MultiSteps` around and inside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.errors import ConfigError
from gradscale.jax import MultiSteps, current_scale, last, loss_scaled

INF, NAN = float("inf"), float("nan")
PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}


def sgd(policy=None, rate=1.0, **options):
    policy = policy or DynamicScale(init_scale=8.0)
    return loss_scaled(optax.sgd(rate), policy, **options)


# One optimizer for many tests, so that it is compiled once.
BY_TWOS = MultiSteps(sgd(), 2)
BY_THREES = MultiSteps(sgd(), 3)
OPTAX_BY_TWOS = optax.MultiSteps(sgd(), 2)


@functools.cache
def jitted(optimizer):
    return jax.jit(optimizer.update)


def states(optimizer, values, dtype=jnp.float32, **extra):
    """Return (updates, state) after every micro-batch of one weight."""
    params = jnp.ones(1, dtype)
    told = [(None, optimizer.init(params))]
    update = jitted(optimizer)
    for value in values:
        grads = np.full(1, value, dtype)
        told.append(update(grads, told[-1][1], params, **extra))
    return told[1:]


def walk(optimizer, values, **options):
    """Return the updates of every micro-batch, and the last state."""
    told = states(optimizer, values, **options)
    return [float(updates[0]) for updates, _ in told], told[-1][1]


# Around


@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_overflow_poisons_the_accumulator_of_optax_for_ever(bad):
    told, state = walk(OPTAX_BY_TWOS, [bad, 8.0] + [8.0] * 8)
    assert told == [0.0] * 10
    assert np.isnan(state.acc_grads).all()
    assert int(state.inner_opt_state.skipped_steps) == 5


@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_overflow_costs_us_one_step(bad):
    told, state = walk(BY_TWOS, [bad, 8.0, 4.0, 8.0, 4.0, 4.0])
    assert told == [0.0, 0.0, 0.0, -1.5, 0.0, -1.0]
    assert state.acc_grads.tolist() == [0.0]
    assert int(state.inner_opt_state.skipped_steps) == 1


@pytest.mark.parametrize("place", range(3))
def test_an_overflow_in_any_micro_batch_skips_the_whole_step(place):
    values = [8.0, 8.0, 8.0, 4.0, 4.0, 4.0]
    values[place] = INF
    told, _ = walk(BY_THREES, values)
    assert told == [0.0, 0.0, 0.0, 0.0, 0.0, -1.0]


def test_the_scale_moves_once_for_all_micro_batches():
    optimizer = MultiSteps(sgd(DynamicScale(init_scale=8.0, growth_interval=1)), 3)
    told = states(optimizer, [1.0, 1.0, 1.0, INF, 1.0, INF, 1.0, 1.0, 1.0])
    scales = [float(current_scale(state)) for _, state in told]
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 8.0, 8.0, 8.0, 16.0]


def test_finite_micro_batches_give_what_optax_gives():
    values = [3.0, 5.0, 7.0, -2.0, 0.5, 16.0, 1.0]
    ours, state = walk(BY_TWOS, values)
    theirs, true_state = walk(OPTAX_BY_TWOS, values)
    assert ours == theirs
    assert state.acc_grads.tolist() == true_state.acc_grads.tolist() == [1.0]


@functools.cache
def compiled(k, mean):
    optimizer = MultiSteps(sgd(StaticScale(scale=8.0)), k, use_grad_mean=mean)
    return optimizer.init(jnp.ones(1)), jax.jit(optimizer.update)


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@settings(max_examples=30)
@given(st.lists(st.integers(-8, 8) | st.just(INF), min_size=12, max_size=12))
def test_exactly_the_steps_with_an_overflow_are_skipped(mean, values):
    state, update = compiled(4, mean)
    told = []
    for value in values:
        updates, state = update(jnp.full(1, float(value)), state, jnp.ones(1))
        told.append(float(updates[0]))
    for start in (0, 4, 8):
        batch = values[start : start + 4]
        true = sum(batch) / (4.0 if mean else 1.0) / 8.0
        # The running mean divides by 3 on its way.
        assert told[start + 3] == pytest.approx(
            0.0 if INF in batch else -true, rel=2.0**-20, abs=2.0**-20
        )
    assert told[0:3] + told[4:7] + told[8:11] == [0.0] * 9


def test_the_number_of_micro_batches_may_be_a_schedule():
    optimizer = MultiSteps(sgd(), lambda step: jnp.where(step < 1, 1, 3))
    told, _ = walk(optimizer, [8.0, INF, 8.0, 8.0, 8.0, 8.0, 8.0])
    # After the overflow the scale is 4.
    assert told == [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -2.0]


def test_one_micro_batch_a_step_is_no_accumulation():
    told, _ = walk(MultiSteps(sgd(), 1), [8.0, INF, 8.0])
    assert told == [-1.0, 0.0, -2.0]


def test_micro_batches_may_be_summed():
    told, _ = walk(MultiSteps(sgd(), 2, use_grad_mean=False), [8.0, 16.0])
    assert told == [0.0, -3.0]


@pytest.mark.parametrize(
    ("skip", "name"),
    [
        (optax.skip_not_finite, "skip_not_finite"),
        (functools.partial(optax.skip_large_updates, max_squared_norm=1.0), "partial"),
    ],
    ids=["not finite", "large"],
)
def test_a_function_that_keeps_micro_batches_from_loss_scaled_is_refused(skip, name):
    with pytest.raises(ConfigError, match=rf"should_skip_update_fn=.*{name}") as error:
        MultiSteps(sgd(), 2, should_skip_update_fn=skip)
    assert "put optax.MultiSteps inside loss_scaled. [GS101]" in str(error.value)


def test_the_dtype_of_the_sum_may_be_chosen():
    optimizer = MultiSteps(sgd(), 2, accumulator_dtype=jnp.bfloat16)
    assert optimizer.init(jnp.ones(1)).acc_grads.dtype == jnp.bfloat16


def test_has_updated_says_when_a_step_was_due():
    told = [
        bool(BY_TWOS.has_updated(state))
        for _, state in states(BY_TWOS, [8.0, INF, 8.0, 8.0])
    ]
    assert told == [False, True, False, True]


def test_the_norm_that_is_clipped_is_that_of_the_sum():
    optimizer = MultiSteps(sgd(max_norm=2.0), 2)
    told, state = walk(optimizer, [8.0, 56.0])
    assert told == [0.0, -2.0]
    assert float(last(state).grad_norm) == 4.0


def test_last_shows_the_sum_and_not_the_micro_batch():
    _, state = walk(BY_TWOS, [8.0, 16.0, 100.0])
    assert (int(last(state).step), float(last(state).amax)) == (1, 12.0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_gradients_are_accumulated(dtype):
    updates, _ = states(BY_TWOS, [8.0, 24.0], dtype)[-1]
    moved = optax.apply_updates(jnp.ones(1, dtype), updates)
    assert (moved.dtype, moved.tolist()) == (dtype, [-1.0])


def test_a_sum_that_half_precision_cannot_hold_is_skipped():
    optimizer = MultiSteps(sgd(), 2, use_grad_mean=False)
    told, state = walk(optimizer, [60000.0, 60000.0], dtype=jnp.float16)
    assert told == [0.0, 0.0]
    assert float(current_scale(state)) == 4.0


def test_value_reaches_the_inner_optimizer():
    optimizer = MultiSteps(loss_scaled(optax.polyak_sgd(100.0), NoScale()), 2)
    told, state = walk(optimizer, [2.0, 2.0], value=jnp.float32(6.0))
    assert told == [0.0, -3.0]
    assert last(state).loss_finite


def test_it_is_a_multi_steps_of_optax():
    assert isinstance(BY_TWOS, optax.MultiSteps)
    assert isinstance(BY_TWOS.init(jnp.ones(1)), optax.MultiStepsState)


def test_it_can_be_chained():
    transform = MultiSteps(sgd(), 2).gradient_transformation()
    assert isinstance(transform, optax.GradientTransformationExtraArgs)
    told, _ = walk(optax.chain(transform, optax.scale(10.0)), [INF, 8.0, 4.0, 4.0])
    assert told == [0.0, 0.0, 0.0, -10.0]


def test_the_state_keeps_its_dtypes():
    first = BY_TWOS.init(PARAMS)
    later = jax.eval_shape(BY_TWOS.update, PARAMS, first, PARAMS)[1]
    kinds = [
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
        for state in (first, later)
    ]
    assert kinds[0] == kinds[1]


# Inside


def test_accumulation_inside_judges_every_micro_batch_by_itself():
    inner = optax.MultiSteps(optax.sgd(1.0), 2)
    optimizer = loss_scaled(inner, DynamicScale(init_scale=8.0))
    told, state = walk(optimizer, [8.0, INF, 12.0, 4.0, NAN])
    # The overflow halves the scale: 8 / 8 and 12 / 4 make up the first step.
    assert told == [0.0, 0.0, -2.0, 0.0, 0.0]
    assert (int(state.applied_steps), int(state.skipped_steps)) == (3, 2)
    assert int(state.inner.mini_step) == 1
    assert state.inner.acc_grads.tolist() == [1.0]
