"""Under the transforms of JAX: `jit`, `grad`, `vmap`, `scan`, `while_loop`."""

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from gradscale import DynamicScale, NoScale, StaticScale
from gradscale.core.state import PYTHON, Observed
from gradscale.jax import (
    current_scale,
    init,
    last,
    loss_scaled,
    retried_value_and_grad,
    scale,
    scaled_value_and_grad,
    value_and_grad,
)
from tests.jax.halves import as_half

# Relative.
TOLERANCES = {
    # Sums over 130 rows of 128, one after the other: half a unit in the last place for
    # each addition. The products on the way round a few times more.
    "meta-gradient": (130 + 128 + 6) * 2.0**-24,
}
# The factor on the batch that overflows f16 at every scale above 1.
LARGE = 2.0**15
DYNAMIC = DynamicScale(
    init_scale=2.0**10, growth_interval=2, min_scale=2.0**4, max_scale=2.0**12
)
# What each policy is tried with, and the batch that is too much for it.
POLICIES = {
    "dynamic": (DYNAMIC, LARGE),
    "static": (StaticScale(scale=2.0**10), LARGE),
    "none": (NoScale(), math.inf),
}
FINITE = [True, True, False, True, False, False, True, True, True, True]
POLICY = pytest.mark.parametrize("name", POLICIES)


# --- what is trained ------------------------------------------------------------------


def first_params():
    # With a dtype: JAX takes what it fills without one for weakly typed.
    w, b = jnp.full(4, 0.5, jnp.float32), jnp.full((2, 3), 0.5, jnp.float32)
    return {"w": w, "b": b}


def loss_of(params, batch):
    """Overflow f16, going backward only, where scale times batch is above 65504.

    All gradients are small whole numbers: exact, whatever is fused.
    """
    half = as_half(params["w"]) * as_half(batch)
    return half.astype(jnp.float32).sum() + params["b"].sum() * batch.min()


def batches(large=LARGE, finite=tuple(FINITE)):
    """Return f32[4] for each step: whole numbers, or one that is too large."""
    rng = np.random.default_rng(3)
    made = np.float32(rng.integers(1, 4, (len(finite), 4)))
    made[~np.array(finite), 2] = large
    return jnp.asarray(made)


@functools.cache
def optimizer(policy=DYNAMIC, **options):
    # Powers of two, so that ten steps are exact; momentum, so that a skip shows.
    return loss_scaled(optax.sgd(2.0**-3, momentum=0.5), policy, **options)


def step_by(made, loss=loss_of):
    def step(params, state, batch):
        value, grads = scaled_value_and_grad(loss)(state, params, batch)
        updates, state = made.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def retried_step_by(made, policy=DYNAMIC):
    retried = retried_value_and_grad(loss_of, policy)

    def step(params, state, batch):
        value, grads, state = retried(state, params, batch)
        updates, state = made.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def walk(step, given, steps):
    """Return parameters and state after every step."""
    reached = []
    for batch in steps:
        given = step(*given, batch)
        reached.append(given)
    return reached


def start(made):
    params = first_params()
    return params, made.init(params)


@functools.cache
def loop(name="dynamic"):
    """Return parameters and state after every step of a compiled run."""
    policy, large = POLICIES[name]
    made = optimizer(policy)
    return walk(jax.jit(step_by(made)), start(made), batches(large))


def scales(reached):
    return [current_scale(state).tolist() for _, state in reached]


def applied(reached):
    return [last(state).applied.tolist() for _, state in reached]


def expected_scales(policy, finite):
    """Return the scale after each step, by the rule over Python floats."""
    state, moved = policy.init_state(), []
    for flag in finite:
        state = policy.next_state(state, Observed(flag, 1.0, True), PYTHON.where)
        moved.append(state.scale)
    return moved


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


def kinds(tree):
    """Return shape, dtype and weakness of every leaf."""
    leaves = jax.tree.leaves(tree)
    return [(leaf.shape, leaf.dtype.name, leaf.weak_type) for leaf in leaves]


@pytest.mark.parametrize("other", [np.float32(-0.0), np.float16(0), np.int32(0)])
def test_a_leaf_that_differs_is_named(other):
    zero = np.float32(0.0)
    assert differing({"a": zero, "b": zero}, {"a": other, "b": zero}) == ["['a']"]


@POLICY
def test_the_run_is_that_of_the_reference(name):
    assert scales(loop(name)) == expected_scales(POLICIES[name][0], FINITE)
    assert applied(loop(name)) == FINITE


@POLICY
def test_a_skipped_step_of_the_run_moves_neither_weights_nor_momentum(name):
    first = start(optimizer(POLICIES[name][0]))
    kept = [(params, state.inner) for params, state in [first, *loop(name)]]
    moved = [differing(*pair) != [] for pair in itertools.pairwise(kept)]
    assert moved == FINITE


# --- one trace ------------------------------------------------------------------------


def traced_and_compiled(step, given, steps):
    """Return how often a donated step is traced and how often XLA compiles."""
    traced, compiled = [], []

    def watched(*args):
        traced.append(1)
        return step(*args)

    def listen(event, seconds, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    # Ready before: slices are compiled too.
    steps = jax.block_until_ready(list(steps))
    jitted = jax.jit(watched, donate_argnums=(0, 1))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in steps:
            given = jitted(*given, batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(traced), len(compiled)


MAKERS = {
    "plain": lambda policy: step_by(optimizer(policy)),
    "clipped": lambda policy: step_by(optimizer(policy, max_norm=1.0)),
    "retried": lambda policy: retried_step_by(optimizer(policy), policy),
}


@POLICY
@pytest.mark.parametrize("maker", MAKERS)
def test_a_run_is_traced_and_compiled_once(name, maker):
    policy, large = POLICIES[name]
    given = start(optimizer(policy))
    counts = traced_and_compiled(MAKERS[maker](policy), given, batches(large))
    assert counts == (1, 1)


def test_a_run_from_a_state_made_under_jit_is_compiled_once():
    made = optimizer()
    params = first_params()
    given = params, jax.jit(made.init)(params)
    assert traced_and_compiled(step_by(made), given, batches()) == (1, 1)


def test_weakly_typed_parameters_would_be_traced_twice():
    made = optimizer()
    weak = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5), first_params())
    given = weak, made.init(weak)
    assert traced_and_compiled(step_by(made), given, batches()) == (2, 2)


# --- donation -------------------------------------------------------------------------

WRAPPED = {
    "sgd": lambda policy: loss_scaled(optax.sgd(0.1), policy),
    "adamw": lambda policy: loss_scaled(optax.adamw(0.1), policy, max_norm=1.0),
}


def aliased(compiled):
    """Return the numbers of the inputs that a program reuses for its outputs."""
    head = compiled.as_text().split("\n")[0]
    return sorted(map(int, re.findall(r"\((\d+), \{\}, \w+-alias\)", head)))


@POLICY
@pytest.mark.parametrize("inner", WRAPPED)
def test_every_leaf_of_the_state_is_aliased(name, inner):
    made = WRAPPED[inner](POLICIES[name][0])
    given = start(made)
    step = jax.jit(step_by(made), donate_argnums=(0, 1))
    compiled = step.lower(*given, jnp.ones(4)).compile()
    assert aliased(compiled) == list(range(len(jax.tree.leaves(given))))


@POLICY
def test_every_leaf_of_the_state_is_given_up(name):
    made = optimizer(POLICIES[name][0])
    given = start(made)
    jax.jit(step_by(made), donate_argnums=(0, 1))(*given, jnp.ones(4))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_a_step_without_donation_aliases_nothing():
    made = optimizer()
    step = jax.jit(step_by(made))
    assert aliased(step.lower(*start(made), jnp.ones(4)).compile()) == []


# --- types ----------------------------------------------------------------------------


EAGER = pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])


@EAGER
@POLICY
def test_a_first_state_has_no_weak_type(name, eager):
    made = optimizer(POLICIES[name][0])
    state = (made.init if eager else jax.jit(made.init))(first_params())
    assert {weak for _, _, weak in kinds(state)} == {False}


@POLICY
@pytest.mark.parametrize("finite", [True, False], ids=["applied", "skipped"])
def test_a_step_keeps_shapes_and_types(name, finite):
    first = kinds(start(optimizer(POLICIES[name][0])))
    assert kinds(loop(name)[FINITE.index(finite)]) == first


def test_a_step_without_jit_keeps_shapes_and_types():
    made = optimizer()
    given = start(made)
    assert kinds(step_by(made)(*given, jnp.ones(4))) == kinds(given)


def test_the_scale_is_f32_and_the_counts_are_i32():
    state = init(DYNAMIC)
    assert [leaf.dtype.name for leaf in state] == ["float32", "int32", "int32"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_parameters_have_an_inner_state_in_f32(dtype):
    made = loss_scaled(optax.adam(0.1), DYNAMIC)
    params = {"w": jnp.ones(4, dtype), "b": jnp.ones((2, 3), dtype)}
    _, state = jax.jit(step_by(made))(params, made.init(params), jnp.ones(4))
    floats = [kind for _, kind, _ in kinds(state.inner) if kind != "int32"]
    assert set(floats) == {"float32"}


def test_shapes_can_be_had_without_a_step():
    made = optimizer()
    given = start(made)
    shapes = jax.eval_shape(step_by(made), *given, jnp.ones(4))
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(
        lambda leaf: leaf.shape, given
    )


def test_a_step_needs_no_implicit_promotion():
    made = optimizer(max_norm=1.0)
    with jax.numpy_dtype_promotion("strict"):
        _, state = jax.jit(step_by(made))(*start(made), jnp.ones(4))
    assert last(state).applied


def test_no_tracer_leaks():
    made = optimizer(max_norm=1.0)
    with jax.checking_leaks():
        _, state = jax.jit(retried_step_by(made))(*start(made), jnp.ones(4))
    assert last(state).applied


# --- the host -------------------------------------------------------------------------


def test_nothing_is_sent_to_the_device_during_a_step():
    made = optimizer(max_norm=1.0)
    step = jax.jit(step_by(made))
    given, batch = start(made), jnp.full(4, LARGE)
    step(*given, batch)
    with jax.transfer_guard("disallow"):
        _, state = step(*given, batch)
    assert not last(state).applied


def test_the_guard_sees_what_is_sent_to_the_device():
    made = optimizer()
    step = jax.jit(step_by(made))
    given = start(made)
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(RuntimeError, match="Disallowed host-to-device transfer"),
    ):
        step(*given, np.ones(4, np.float32))


def calls_to_the_host(step, *args):
    text = jax.jit(step).lower(*args).compile().as_text()
    return re.findall(r"callback|infeed|outfeed| send\(| recv\(", text)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_step_calls_nothing_on_the_host(maker):
    given = start(optimizer())
    assert calls_to_the_host(MAKERS[maker](DYNAMIC), *given, jnp.ones(4)) == []


def test_a_call_to_the_host_is_seen():
    def told(x):
        jax.debug.callback(lambda value: None, x)
        return x

    assert calls_to_the_host(told, jnp.ones(4))


# --- derivatives ----------------------------------------------------------------------


def cubic(w):
    """A loss whose derivatives are whole numbers: 12, 12 and 6 at 2."""
    return w**3


def test_the_gradient_of_a_scaled_loss_is_scaled():
    grad = jax.grad(lambda w: scale(cubic(w), init(DYNAMIC)))(2.0)
    assert grad == 12.0 * 2.0**10


def test_a_gradient_through_an_unscaled_gradient_is_the_second_derivative():
    differentiated = value_and_grad(cubic)
    assert jax.grad(lambda w: differentiated(init(DYNAMIC), w)[1])(2.0) == 12.0


def test_a_loss_passes_its_own_gradient_on():
    differentiated = value_and_grad(cubic)
    assert jax.grad(lambda w: differentiated(init(DYNAMIC), w)[0])(2.0) == 12.0


def test_a_forward_derivative_of_an_unscaled_gradient_is_the_second_derivative():
    differentiated = value_and_grad(cubic)
    _, tangent = jax.jvp(lambda w: differentiated(init(DYNAMIC), w)[1], (2.0,), (1.0,))
    assert tangent == 12.0


def test_a_third_derivative_passes_through():
    differentiated = value_and_grad(cubic)
    second = jax.grad(lambda w: differentiated(init(DYNAMIC), w)[1])
    assert jax.grad(second)(2.0) == 6.0


def meta_params(factor):
    """Return a small and a large array: the two ways in which gradients are read."""
    steps = jnp.arange(130 * 128, dtype=jnp.float32).reshape(130, 128)
    return {"small": factor * jnp.arange(1.0, 6.0), "large": factor * jnp.cos(steps)}


RATE = 2.0**-6


def squares(params):
    """Return a loss that bends, and whose gradient is 0 where the parameters are."""
    return sum((leaf**2 + leaf**4 / 4).sum() for leaf in jax.tree.leaves(params))


def distance(params):
    """Return another loss, whose gradient is not 0 there."""
    return sum(((leaf - 1.0) ** 2).sum() for leaf in jax.tree.leaves(params))


def after_a_step(weights, rate, wrapper, max_norm):
    """Return how far off a step leads, as a function of all that went into it."""
    if wrapper == "ours":
        made = loss_scaled(optax.sgd(rate), DYNAMIC, max_norm=max_norm)
        state = made.init(weights)
        _, grads = scaled_value_and_grad(squares)(state, weights)
    else:
        clip = optax.clip_by_global_norm(max_norm) if max_norm else optax.identity()
        made = optax.chain(clip, optax.sgd(rate))
        state = made.init(weights)
        grads = jax.grad(squares)(weights)
    updates, _ = made.update(grads, state, weights)
    return distance(optax.apply_updates(weights, updates))


@functools.cache
def meta_gradients(wrapper, max_norm, backend="cpu", factor=1.0):
    """Return the derivatives of a step with respect to the weights and the rate.

    Read by the reductions of a backend, which need not be there.
    """
    grads = jax.jit(jax.grad(after_a_step, (0, 1)), static_argnums=(2, 3))
    with mock.patch.object(jax, "default_backend", return_value=backend):
        return grads(meta_params(factor), RATE, wrapper, max_norm)


@functools.cache
def meta_tangent(wrapper, max_norm, backend="cpu"):
    """Return the derivative of a step in the direction of ones."""

    def along(weights):
        ones = jax.tree.map(jnp.ones_like, weights)
        step = functools.partial(after_a_step, wrapper=wrapper, max_norm=max_norm)
        return jax.jvp(step, (weights, RATE), (ones, 1.0))[1]

    with mock.patch.object(jax, "default_backend", return_value=backend):
        return float(jax.jit(along)(meta_params(1.0)))


BACKEND = pytest.mark.parametrize("backend", ["cpu", "gpu"])
LEAF = pytest.mark.parametrize("leaf", ["small", "large"])
# The norm of the gradients is about 300.
CLIP = pytest.mark.parametrize("max_norm", [None, 1.0, 1e4], ids=["no", "yes", "far"])


@CLIP
@BACKEND
def test_the_gradient_with_respect_to_the_rate_is_that_of_optax(max_norm, backend):
    _, mine = meta_gradients("ours", max_norm, backend)
    _, theirs = meta_gradients("optax", max_norm)
    assert float(mine) == pytest.approx(float(theirs), rel=TOLERANCES["meta-gradient"])


@CLIP
@LEAF
@BACKEND
def test_the_gradient_with_respect_to_the_weights_is_that_of_optax(
    max_norm, leaf, backend
):
    mine, _ = meta_gradients("ours", max_norm, backend)
    theirs, _ = meta_gradients("optax", max_norm)
    # Of the largest: the smaller ones are differences of such.
    limit = TOLERANCES["meta-gradient"] * float(jnp.abs(theirs[leaf]).max())
    np.testing.assert_allclose(mine[leaf], theirs[leaf], rtol=0.0, atol=limit)


@BACKEND
def test_a_forward_derivative_is_that_of_optax(backend):
    mine, theirs = meta_tangent("ours", 1.0, backend), meta_tangent("optax", 1.0)
    assert mine == pytest.approx(theirs, rel=TOLERANCES["meta-gradient"])


def test_a_clip_shows_in_the_derivatives():
    _, clipped = meta_gradients("optax", 1.0)
    _, free = meta_gradients("optax", None)
    assert not math.isclose(clipped, free, rel_tol=0.1)


@LEAF
@BACKEND
@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["no", "yes"])
def test_gradients_of_zero_have_the_derivative_of_a_step_without_clip(
    max_norm, leaf, backend
):
    # Where the norm is 0 its root has no slope, and the clip of optax gives NaN.
    mine, _ = meta_gradients("ours", max_norm, backend, factor=0.0)
    theirs, _ = meta_gradients("optax", None, factor=0.0)
    assert mine[leaf].tolist() == theirs[leaf].tolist()


# --- vmap -----------------------------------------------------------------------------

# Member by member, which steps are finite.
MEMBERS = [
    [True, True, True, True, True, True],
    [False, True, True, False, False, True],
    [True, False, False, False, False, False],
]


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def ensemble():
    """Return parameters and states of all members, and their batches by step."""
    given = stacked([start(optimizer())] * len(MEMBERS))
    return given, np.stack([batches(finite=tuple(m)) for m in MEMBERS], axis=1)


@functools.cache
def loop_of_members():
    return walk(jax.jit(jax.vmap(step_by(optimizer()))), *ensemble())


def test_members_move_as_if_each_were_alone():
    step, given = jax.jit(step_by(optimizer())), start(optimizer())
    alone = [walk(step, given, batches(finite=tuple(m)))[-1] for m in MEMBERS]
    assert differing(loop_of_members()[-1], stacked(alone)) == []


def test_a_member_that_overflows_is_skipped_alone():
    assert applied(loop_of_members()) == np.transpose(MEMBERS).tolist()


def test_every_member_has_a_scale_of_its_own():
    expected = [expected_scales(DYNAMIC, member) for member in MEMBERS]
    assert np.transpose(scales(loop_of_members())).tolist() == expected


def test_states_of_members_can_be_made_together():
    (params, state), _ = ensemble()
    assert differing(jax.vmap(optimizer().init)(params), state) == []


def test_members_with_an_axis_name_skip_together():
    step = step_by(optimizer(axis_name="members"))
    together = walk(jax.jit(jax.vmap(step, axis_name="members")), *ensemble())
    agreed = [all(flags) for flags in zip(*MEMBERS, strict=True)]
    moved = expected_scales(DYNAMIC, agreed)
    assert applied(together) == [[flag] * len(MEMBERS) for flag in agreed]
    assert scales(together) == [[scale] * len(MEMBERS) for scale in moved]


# --- scan, remat, no jit --------------------------------------------------------------


def scanned(step, given, steps):
    """Return what `walk` returns, by a scan."""

    def body(carry, batch):
        reached = step(*carry, batch)
        return reached, reached

    _, reached = jax.jit(lambda given: lax.scan(body, given, steps))(given)
    held = jax.device_get(reached)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], held) for i in range(len(steps))]


@POLICY
def test_a_scan_gives_what_a_loop_gives(name):
    policy, large = POLICIES[name]
    made = optimizer(policy)
    reached = scanned(step_by(made), start(made), batches(large))
    assert differing(reached, loop(name)) == []


def test_an_ensemble_can_be_scanned():
    reached = scanned(jax.vmap(step_by(optimizer())), *ensemble())
    assert differing(reached, loop_of_members()) == []


def test_a_run_without_jit_gives_what_jit_gives():
    with jax.disable_jit():
        # A step on which the scale grows, and an overflow.
        eager = walk(step_by(optimizer()), loop()[0], batches()[1:3])
    assert differing(eager, loop()[1:3]) == []


@pytest.mark.parametrize("keep", ["nothing_saveable", "everything_saveable"])
def test_a_loss_that_is_computed_again_gives_the_same_run(keep):
    again = jax.checkpoint(loss_of, policy=getattr(jax.checkpoint_policies, keep))
    made = optimizer()
    reached = walk(jax.jit(step_by(made, again)), start(made), batches())
    assert differing(reached, loop()) == []


# --- retry ----------------------------------------------------------------------------

TALL = DynamicScale(init_scale=2.0**20)
# 2^15 is the highest power of two in f16.
FITS, RETRIES_TO_FIT = 2.0**15, 5


def half_product(w, x=1.0):
    """Overflow f16, going backward only, where the scale times x is above 65504."""
    return (as_half(w) * as_half(x)).astype(jnp.float32)


def steep(w):
    """Overflow f16, going backward, at any scale above 1/4."""
    half = as_half(w)
    return (half * jnp.float16(2.0**9) * jnp.float16(2.0**9)).astype(jnp.float32)


def watched(loss, attempts):
    """Return the loss; each time it is computed, its value is put on a list."""

    def told(*args):
        value = loss(*args)
        jax.debug.callback(lambda value: attempts.append(float(value)), value)
        return value

    return told


def retry(policy=TALL, loss=half_product, weight=1.0, **options):
    """Return what one step of retries gave, and the losses of its attempts."""
    attempts = []
    retried = retried_value_and_grad(watched(loss, attempts), policy, **options)
    result = jax.jit(retried)(init(policy), jnp.float32(weight))
    jax.effects_barrier()
    return result, attempts


def test_the_first_scale_that_fits_is_found():
    (_, grad, state), attempts = retry(retries=20)
    assert (state.scale, grad / state.scale) == (FITS, 1.0)
    assert len(attempts) == 1 + RETRIES_TO_FIT


def test_a_batch_that_fits_is_computed_once():
    (_, _, state), attempts = retry(DynamicScale(init_scale=FITS), retries=20)
    assert (state.scale, len(attempts)) == (FITS, 1)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_the_attempts_are_bounded(retries):
    (_, grad, state), attempts = retry(retries=retries)
    assert len(attempts) == 1 + retries
    assert state.scale == 2.0 ** (20 - retries)
    assert math.isinf(grad)


def test_no_retry_is_a_scaled_gradient():
    (value, grad, state), _ = retry(retries=0)
    assert (value, grad) == scaled_value_and_grad(half_product)(init(TALL), 1.0)
    assert differing(state, init(TALL)) == []


ONCE = {
    "the loss is inf": (TALL, half_product, math.inf),
    "the loss is NaN": (TALL, half_product, math.nan),
    "the scale is static": (StaticScale(scale=2.0**20), half_product, 1.0),
    "there is no scale": (NoScale(), steep, 2.0**-9),
    "the overflow is forgiven": (
        DynamicScale(init_scale=2.0**20, tolerance=0.1),
        half_product,
        1.0,
    ),
    "the scale is at its floor": (
        DynamicScale(init_scale=2.0**20, min_scale=2.0**20),
        half_product,
        1.0,
    ),
}


@pytest.mark.parametrize("why", ONCE)
def test_a_batch_is_not_tried_again_if(why):
    policy, loss, weight = ONCE[why]
    (_, grad, state), attempts = retry(policy, loss, weight, retries=20)
    assert not jnp.isfinite(grad)
    assert len(attempts) == 1
    assert differing(state, init(policy)) == []


def test_the_floor_ends_the_attempts():
    policy = DynamicScale(init_scale=2.0**20, min_scale=2.0**18)
    (_, _, state), attempts = retry(policy, retries=20)
    assert (state.scale, len(attempts)) == (2.0**18, 3)


def test_a_second_overflow_is_not_forgiven_and_tried_again():
    policy = DynamicScale(init_scale=2.0**20, tolerance=0.1)
    owing = init(policy)._replace(debt=jnp.int32(8))
    retried = retried_value_and_grad(half_product, policy, retries=20)
    _, grad, state = jax.jit(retried)(owing, 1.0)
    assert (state.scale, grad / state.scale) == (FITS, 1.0)


def dropped_out(w, key):
    """Return a loss that shows which elements were dropped: a sum of powers of two."""
    kept = jax.random.bernoulli(key, 0.5, (10,))
    return half_product(w) * (kept * 2.0 ** jnp.arange(10)).sum()


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_every_attempt_drops_the_same_elements(make):
    attempts = []
    retried = retried_value_and_grad(watched(dropped_out, attempts), TALL, retries=20)
    value, grad, state = jax.jit(retried)(init(TALL), jnp.float32(1.0), make(1))
    jax.effects_barrier()
    assert len(attempts) > 1
    assert set(attempts) == {float(dropped_out(1.0, make(1)))} == {float(value)}
    assert grad / state.scale == value


def test_another_key_would_drop_other_elements():
    assert dropped_out(1.0, jax.random.key(1)) != dropped_out(1.0, jax.random.key(2))


def test_a_key_may_be_handed_on():
    def loss(w, key):
        key, mine = jax.random.split(key)
        return dropped_out(w, mine), key

    retried = retried_value_and_grad(loss, TALL, has_aux=True, retries=20)
    (_, key), _, _ = jax.jit(retried)(init(TALL), jnp.float32(1.0), jax.random.key(1))
    assert key == jax.random.split(jax.random.key(1))[0]


def test_the_loss_is_traced_no_more_often_for_more_retries():
    def traces(retries):
        traced = []

        def loss(w):
            traced.append(1)
            return half_product(w)

        jax.jit(retried_value_and_grad(loss, TALL, retries=retries))(init(TALL), 1.0)
        return len(traced)

    assert traces(20) == traces(0)


def retried_update(policy=TALL, axis_name=None):
    """Return an optimizer, and a step with retries of a weight and its state."""
    made = loss_scaled(optax.sgd(2.0**-3), policy, axis_name=axis_name)
    retried = retried_value_and_grad(
        half_product, policy, retries=20, axis_name=axis_name
    )

    def step(weight, state, x):
        value, grad, state = retried(state, weight, x)
        updates, state = made.update(grad, state, weight, value=value)
        return weight + updates, state

    return made, step


def test_attempts_are_counted_over_the_run():
    made, step = retried_update()
    given = jnp.float32(1.0), made.init(1.0)
    reached = walk(jax.jit(step), given, [1.0, 1.0, 2.0**3])
    assert [int(state.retried_steps) for _, state in reached] == [5, 5, 8]
    assert [int(state.applied_steps) for _, state in reached] == [1, 2, 3]


def test_a_retried_step_is_exact():
    made, step = retried_update()
    moved, _ = jax.jit(step)(jnp.float32(1.0), made.init(1.0), 4.0)
    assert moved == 1.0 - 4.0 * 2.0**-3


def test_a_step_whose_attempts_ran_out_is_skipped_and_backs_off_once_more():
    made = loss_scaled(optax.sgd(1.0), TALL)
    retried = retried_value_and_grad(half_product, TALL, retries=2)

    def step(state):
        _, grad, state = retried(state, 1.0)
        return made.update(grad, state, 1.0)[1]

    state = jax.jit(step)(made.init(1.0))
    assert current_scale(state) == 2.0**17
    assert (state.skipped_steps, state.retried_steps) == (1, 2)


def test_the_state_is_found_in_a_chain():
    made = optax.chain(optax.identity(), loss_scaled(optax.sgd(1.0), TALL))
    retried = retried_value_and_grad(half_product, TALL, retries=20)
    _, _, state = retried(made.init(1.0), 1.0)
    assert current_scale(state) == FITS


FITTING = DynamicScale(init_scale=FITS)
# They fit at 2^15, 2^12 and 2^9.
SIZES = np.float32([1.0, 2.0**3, 2.0**6])


def members(made):
    weights = jnp.ones(3)
    return weights, jax.vmap(made.init)(weights)


def test_every_member_tries_again_as_often_as_it_must():
    made, step = retried_update(FITTING)
    _, state = jax.jit(jax.vmap(step))(*members(made), SIZES)
    assert state.retried_steps.tolist() == [0, 3, 6]
    assert current_scale(state).tolist() == [2.0**15, 2.0**12, 2.0**9]


def test_members_that_try_again_move_as_if_each_were_alone():
    made, step = retried_update(FITTING)
    together = jax.jit(jax.vmap(step))(*members(made), SIZES)
    given = jnp.float32(1.0), made.init(1.0)
    step = jax.jit(step)
    assert differing(together, stacked([step(*given, size) for size in SIZES])) == []


def test_members_with_an_axis_name_try_again_together():
    made, step = retried_update(FITTING, "members")
    _, state = jax.jit(jax.vmap(step, axis_name="members"))(*members(made), SIZES)
    assert state.retried_steps.tolist() == [6, 6, 6]
    assert current_scale(state).tolist() == [2.0**9] * 3


def test_a_bad_loss_of_one_member_ends_the_attempts_of_all():
    made, step = retried_update(FITTING, "members")
    weights, state = members(made)
    weights = weights.at[0].set(jnp.inf)
    _, state = jax.jit(jax.vmap(step, axis_name="members"))(weights, state, SIZES)
    assert state.retried_steps.tolist() == [0, 0, 0]
    assert last(state).applied.tolist() == [False] * 3


def test_a_loss_with_a_collective_can_be_tried_again():
    def loss(w, x):
        return lax.pmean(half_product(w, x), "members")

    def one(state, w, x):
        return retried_value_and_grad(loss, TALL, retries=20, axis_name="members")(
            state, w, x
        )

    given = stacked([init(TALL)] * 3), np.ones(3, np.float32), SIZES
    value, _, state = jax.jit(jax.vmap(one, axis_name="members"))(*given)
    assert value.tolist() == [float(SIZES.mean())] * 3
    assert len(set(state.scale.tolist())) == 1


def test_a_scan_with_retries_gives_what_a_loop_gives():
    made, step = retried_update()
    given = jnp.float32(1.0), made.init(jnp.float32(1.0))
    steps = jnp.array([1.0, 2.0**3, 1.0, 2.0**9, 2.0])
    reached = walk(jax.jit(step), given, steps)
    assert differing(scanned(step, given, steps), reached) == []


def test_retries_without_jit_give_what_jit_gives():
    made, step = retried_update(FITTING)
    given = jnp.float32(1.0), made.init(1.0)
    compiled = jax.jit(step)(*given, 2.0**3)
    with jax.disable_jit():
        eager = step(*given, 2.0**3)
    assert differing(eager, compiled) == []


def test_a_loss_that_is_computed_again_can_be_tried_again():
    (_, grad, state), _ = retry(loss=jax.checkpoint(half_product), retries=20)
    assert (state.scale, grad / state.scale) == (FITS, 1.0)


# --- 64 bits --------------------------------------------------------------------------

IN_64_BITS = """
import json
import jax
import jax.numpy as jnp
import optax
from gradscale import DynamicScale
from gradscale.jax import init, last, loss_scaled, observe, retried_value_and_grad
from gradscale.jax import scaled_value_and_grad, unscale, update

def kinds(tree):
    return [(leaf.dtype.name, leaf.weak_type) for leaf in jax.tree.leaves(tree)]

policy = DynamicScale(init_scale=2.0**10, growth_interval=2)
params = {"f32": jnp.ones(3, jnp.float32), "f64": jnp.ones(3, jnp.float64)}
# Beyond the digits of f32, and beyond its range.
fine, vast = 1.0 + 2.0**-40, 2.0**200
traced = []

def loss_of(params, factor):
    traced.append(1)
    return params["f32"].sum().astype(jnp.float64) + (params["f64"] * factor).sum()

def run(maker, max_norm):
    made = loss_scaled(optax.sgd(2.0**-3, momentum=0.5), policy, max_norm=max_norm)
    state = made.init(params)
    first = kinds(state)
    kept, steps = params, 0
    step = jax.jit(maker(made), donate_argnums=1)
    traced.clear()
    for factor in (1.0, 1.0, float("inf"), 1.0, 1.0):
        kept, state, grads, updates = step(kept, state, jnp.float64(factor))
        steps = steps or len(traced)
    return {
        "first": first,
        "state": kinds(state),
        "grads": kinds(grads),
        "updates": kinds(updates),
        "params": kinds(kept),
        "traced_again": len(traced) - steps,
        "scale": float(state.rule.scale),
        "applied": int(state.applied_steps),
    }

def plain(made):
    def step(params, state, factor):
        value, grads = scaled_value_and_grad(loss_of)(state, params, factor)
        updates, state = made.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, grads, updates
    return step

def retried(made):
    def step(params, state, factor):
        again = retried_value_and_grad(loss_of, policy)
        value, grads, state = again(state, params, factor)
        updates, state = made.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, grads, updates
    return step

first = init(policy)
large = observe(jnp.array([vast, 1.0]), 2.0**10)
print(json.dumps({
    "plain": run(plain, None),
    "retried": run(retried, 1.0),
    "rule": kinds(first),
    "next": kinds(update(policy, first, jnp.asarray(True))),
    "unscaled": float(unscale(jnp.float64(fine * 2.0**10), first)) == fine,
    "large": bool(large.finite),
    "beyond": bool(observe(jnp.array([1e308 * 10])).finite),
}))
"""


@pytest.fixture(scope="module")
def in_64_bits():
    """Return what a process with 64-bit types showed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_64_BITS],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_ENABLE_X64": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


STEPS = pytest.mark.parametrize("how", ["plain", "retried"])


@STEPS
@pytest.mark.parametrize("what", ["params", "grads", "updates"])
def test_f64_stays_f64_and_f32_stays_f32(in_64_bits, how, what):
    assert in_64_bits[how][what] == [["float32", False], ["float64", False]]


@STEPS
def test_the_state_has_its_types_in_64_bits(in_64_bits, how):
    floats, counts = ["float32", False], ["int32", False]
    # The rule, the counts, the facts, and the momentum.
    expected = [floats, counts, counts, counts, floats, floats, ["float64", False]]
    assert in_64_bits[how]["first"] == in_64_bits[how]["state"] == expected


@STEPS
def test_a_run_is_traced_once_in_64_bits(in_64_bits, how):
    assert in_64_bits[how]["traced_again"] == 0


@STEPS
def test_a_run_has_its_scales_in_64_bits(in_64_bits, how):
    expected = expected_scales(
        DynamicScale(init_scale=2.0**10, growth_interval=2),
        [True, True, False, True, True],
    )
    assert in_64_bits[how]["scale"] == expected[-1]
    assert in_64_bits[how]["applied"] == 4


def test_a_bare_state_has_its_types_in_64_bits(in_64_bits):
    expected = [["float32", False], ["int32", False], ["int32", False]]
    assert in_64_bits["rule"] == in_64_bits["next"] == expected


def test_unscaling_keeps_the_digits_of_f64(in_64_bits):
    assert in_64_bits["unscaled"]


def test_a_gradient_beyond_f32_is_finite_in_f64(in_64_bits):
    assert in_64_bits["large"]
    assert not in_64_bits["beyond"]
