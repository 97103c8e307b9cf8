"""Checkpoints: a run that was stopped is the run that was not."""

import copy
import functools
import pickle
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import serialization

from gradscale import DynamicScale, StateError
from gradscale.core.policies import LOWEST_SCALE
from gradscale.jax import current_scale, last, loss_scaled, scaled_value_and_grad

# --- what is trained ------------------------------------------------------------------

STEPS = 24
STOPS = sorted(random.Random(5).sample(range(1, STEPS), 4))
POLICY = DynamicScale(
    init_scale=2.0**10, growth_interval=2, min_scale=2.0**7, max_scale=2.0**11
)
OPTIMIZER = loss_scaled(optax.adamw(0.05), POLICY, max_norm=0.5)
TRACED = []


def first_params():
    hidden, out = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(hidden, (4, 8)),
        "out": {"w": jax.random.normal(out, (8,)), "b": jnp.zeros(1)},
    }


def loss_of(params, batch):
    half = batch.astype(jnp.float16) @ params["hidden"].astype(jnp.float16)
    hidden = jnp.tanh(half.astype(jnp.float32))
    out = hidden @ params["out"]["w"] + params["out"]["b"]
    return ((out - 1.0) ** 2).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, batch, finite):
    """Take one step; its gradients overflow unless `finite`."""
    TRACED.append(1)
    loss, grads = scaled_value_and_grad(loss_of)(state, params, batch)
    grads["hidden"] = jnp.where(finite, grads["hidden"], jnp.inf)
    updates, state = OPTIMIZER.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state


def start():
    params = first_params()
    return params, OPTIMIZER.init(params)


def finite_flags():
    rng = random.Random(3)
    return [rng.random() > 0.3 for _ in range(STEPS)]


def walk(given, begin, end):
    """Return parameters and state, on the host, after each step from begin to end."""
    flags = finite_flags()
    batches = np.random.default_rng(2).normal(size=(STEPS, 5, 4)).astype(np.float32)
    reached = []
    for place in range(begin, end):
        given = step(*given, batches[place], flags[place])
        # A copy: what the host sees of a donated array is overwritten.
        reached.append(jax.tree.map(np.array, given))
    return given, reached


@functools.cache
def whole_run():
    return walk(start(), 0, STEPS)[1]


def differing(one, other):
    """Return the paths of the leaves of two trees that are not equal in every bit."""
    here, shape = jax.tree_util.tree_flatten_with_path(one)
    there, other_shape = jax.tree_util.tree_flatten_with_path(other)
    assert shape == other_shape
    return [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(here, there, strict=True)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes() or a.dtype != b.dtype
    ]


# --- the ways to keep a state ---------------------------------------------------------


def through_orbax(tree, fresh, folder):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", fresh)


def through_orbax_into_shapes(tree, fresh, folder):
    shapes = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, fresh)
    return through_orbax(tree, shapes, folder)


def through_flax(tree, fresh, folder):
    return serialization.from_bytes(fresh, serialization.to_bytes(tree))


def through_pickle(tree, fresh, folder):
    return pickle.loads(pickle.dumps(tree))


WAYS = {
    "orbax": through_orbax,
    "orbax-shapes": through_orbax_into_shapes,
    "flax": through_flax,
    "pickle": through_pickle,
    "deepcopy": lambda tree, fresh, folder: copy.deepcopy(tree),
}
WAY = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize("other", [np.float32(-0.0), np.float16(0), np.int32(0)])
def test_a_leaf_that_differs_is_named(other):
    zero = np.float32(0.0)
    assert differing({"a": zero, "b": zero}, {"a": other, "b": zero}) == ["['a']"]


def test_the_run_skips_grows_and_meets_both_bounds():
    scales = [current_scale(state).tolist() for _, state in whole_run()]
    assert [last(state).applied.tolist() for _, state in whole_run()] == finite_flags()
    assert {min(scales), max(scales)} == {2.0**7, 2.0**11}


# --- a run that is stopped ------------------------------------------------------------


@WAY
@pytest.mark.parametrize("stop", STOPS)
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(way, stop, tmp_path):
    given, _ = walk(start(), 0, stop)
    restored = WAYS[way](given, start(), tmp_path)
    _, reached = walk(restored, stop, STEPS)
    assert differing(reached, whole_run()[stop:]) == []


@WAY
def test_a_state_is_restored_as_it_was(way, tmp_path):
    given, _ = walk(start(), 0, STOPS[1])
    assert differing(WAYS[way](given, start(), tmp_path), given) == []


@WAY
def test_the_types_of_a_restored_state_are_strong(way, tmp_path):
    _, state = WAYS[way](start(), start(), tmp_path)
    weak = [getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(state)]
    assert not any(weak)


@WAY
def test_a_restored_state_is_not_traced_again(way, tmp_path):
    given, _ = walk(start(), 0, 2)
    TRACED.clear()
    walk(WAYS[way](given, start(), tmp_path), 2, 4)
    assert TRACED == []


@WAY
def test_the_last_step_is_restored(way, tmp_path):
    given, _ = walk(start(), 0, STOPS[2])
    before = last(given[1]).record
    _, state = WAYS[way](given, start(), tmp_path)
    assert last(state).record == before


# --- what a checkpoint does not hold --------------------------------------------------


@WAY
def test_the_floor_is_that_of_the_policy(way, tmp_path):
    given, _ = walk(start(), 0, 2)
    params, state = WAYS[way](given, start(), tmp_path)
    for _ in range(20):
        params, state = step(params, state, np.ones((5, 4), np.float32), False)
    assert current_scale(state) == POLICY.min_scale


@WAY
def test_the_ceiling_is_that_of_the_policy(way, tmp_path):
    given, _ = walk(start(), 0, 2)
    params, state = WAYS[way](given, start(), tmp_path)
    for _ in range(20):
        params, state = step(params, state, np.ones((5, 4), np.float32), True)
    assert current_scale(state) == POLICY.max_scale


def test_another_policy_brings_its_own_floor(tmp_path):
    given, _ = walk(start(), 0, 2)
    params, state = through_orbax(given, start(), tmp_path)
    other = loss_scaled(optax.adamw(0.05), DynamicScale(min_scale=2.0**9))
    bad = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), params)
    update = jax.jit(other.update)
    for _ in range(20):
        _, state = update(bad, state, params)
    assert current_scale(state) == 2.0**9


# --- plain dicts ----------------------------------------------------------------------


def dicts_of_orbax(tree, folder):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state")


def dicts_of_flax(tree, folder):
    return serialization.msgpack_restore(serialization.to_bytes(tree))


@pytest.mark.parametrize("read", [current_scale, last])
@pytest.mark.parametrize(
    ("kept", "kind"), [(dicts_of_orbax, "list"), (dicts_of_flax, "dict")]
)
def test_plain_dicts_are_refused_with_the_remedy(kept, kind, read, tmp_path):
    with pytest.raises(
        StateError,
        match=rf"no state of loss_scaled in this {kind}\.(.|\n)*a checkpoint must be "
        r"restored into such a state, not into plain dicts\.",
    ):
        read(kept(start(), tmp_path))


def test_a_state_dict_of_flax_can_be_put_back():
    given, _ = walk(start(), 0, STOPS[0])
    plain = serialization.to_state_dict(given)
    assert differing(serialization.from_state_dict(start(), plain), given) == []


# --- two hundred ----------------------------------------------------------------------

BOUNDS = {
    "default": DynamicScale(growth_interval=1),
    "narrow": DynamicScale(
        init_scale=2.0**10, growth_interval=1, min_scale=4.0, max_scale=2.0**12
    ),
    "widest": DynamicScale(growth_interval=1, min_scale=LOWEST_SCALE),
}
GRADIENT, RATE = 2.0**-10, 2.0**-3
LONG = 200


@functools.cache
def long_run(name, way, folder):
    """Overflow 200 times, then step 200 times; stop in the middle of both.

    Returns:
        The scales, and the weights, after each step.
    """
    made = loss_scaled(optax.sgd(RATE), BOUNDS[name])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def one(weight, state, batch):
        value, grad = scaled_value_and_grad(lambda w: w * batch)(state, weight)
        updates, state = made.update(grad, state, weight, value=value)
        return weight + updates, state

    fresh = jnp.float32(1.0), made.init(jnp.float32(1.0))
    given, scales, weights = fresh, [], []
    fresh = jax.tree.map(jnp.copy, fresh)
    for place in range(2 * LONG):
        given = one(*given, np.float32(np.inf if place < LONG else GRADIENT))
        given = jax.tree.map(lambda leaf: leaf, given)
        if place in (LONG // 2, LONG + LONG // 2):
            given = WAYS[way](given, fresh, folder / str(place))
        scales.append(float(current_scale(given[1])))
        weights.append(float(given[0]))
    return np.array(scales), np.array(weights)


@pytest.fixture(scope="module", params=["orbax", "flax", "pickle"])
def stopped_by(request, tmp_path_factory):
    """Return what runs the long run through one way to keep a state."""
    folder = tmp_path_factory.mktemp("long")
    return lambda name: long_run(name, request.param, folder / name)


BOUND = pytest.mark.parametrize("name", BOUNDS)


@BOUND
def test_two_hundred_overflows_end_at_the_floor(stopped_by, name):
    scales, _ = stopped_by(name)
    assert scales[:LONG].min() == scales[LONG - 1] == BOUNDS[name].min_scale


@BOUND
def test_two_hundred_growths_double_the_scale_up_to_the_ceiling(stopped_by, name):
    scales, _ = stopped_by(name)
    first = BOUNDS[name].min_scale
    growths = min(BOUNDS[name].max_scale / first, 2.0**LONG)
    assert scales[LONG:].max() == scales[-1] == first * growths


@BOUND
def test_the_scale_is_never_zero_or_inf(stopped_by, name):
    scales, _ = stopped_by(name)
    assert (scales > 0.0).all()
    assert np.isfinite(scales).all()


@BOUND
def test_the_weights_stay_where_they_are_for_two_hundred_overflows(stopped_by, name):
    _, weights = stopped_by(name)
    assert (weights[:LONG] == 1.0).all()


@pytest.mark.parametrize("name", ["default", "narrow"])
def test_every_step_after_two_hundred_overflows_is_exact(stopped_by, name):
    _, weights = stopped_by(name)
    taken = np.arange(1, LONG + 1)
    assert weights[LONG:].tolist() == (1.0 - taken * GRADIENT * RATE).tolist()


def test_weights_are_finite_where_gradients_vanish_at_the_floor(stopped_by):
    # Below 2^-116 the scaled gradient is smaller than any normal f32: a CPU takes it
    # for 0, a GPU does not.
    _, weights = stopped_by("widest")
    steps = set((-np.diff(weights[LONG - 1 :])).tolist())
    assert GRADIENT * RATE in steps
    assert steps <= {0.0, GRADIENT * RATE}
