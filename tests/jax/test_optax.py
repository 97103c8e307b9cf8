"""`loss_scaled` around, inside and beside everything else that optax has."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradscale.jax
from gradscale import DynamicScale, GradientError, NoScale, StateError, StaticScale
from gradscale.jax import current_scale, last, loss_scaled

NAN, INF = float("nan"), float("inf")
RANDOM = np.random.default_rng(3)
PARAMS = {
    "w": jnp.asarray(RANDOM.normal(size=(4, 3)), jnp.float32),
    "b": jnp.asarray(RANDOM.normal(size=3), jnp.float32),
}
FIRST, SECOND = (
    jax.tree.map(
        lambda p: jnp.asarray(RANDOM.normal(size=p.shape), jnp.float32), PARAMS
    )
    for _ in range(2)
)
BAD = {"w": jnp.full((4, 3), NAN), "b": jnp.array([1.0, INF, 1.0])}
ONLY_W = {"w": True, "b": False}


def scheduled(count):
    """A learning rate that differs from step to step."""
    return 0.1 / (count + 1.0)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "schedule": lambda: optax.sgd(scheduled),
    "adamw": lambda: optax.adamw(0.01),
    "adamw in bf16": lambda: optax.adamw(0.01, mu_dtype=jnp.bfloat16),
    "lion": lambda: optax.lion(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.01),
    "muon": lambda: optax.contrib.muon(0.01),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adam)(scheduled),
    "partition": lambda: optax.multi_transform(
        {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()},
        {"w": "trained", "b": "frozen"},
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), ONLY_W),
    "frozen": lambda: optax.freeze({"w": False, "b": True}),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 5),
    "noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1)
    ),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "polyak": lambda: optax.polyak_sgd(0.5),
    "plateau": lambda: optax.chain(
        optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, cooldown=1)
    ),
    "accumulation": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "identity": lambda: optax.identity(),
    "another loss_scaled": lambda: loss_scaled(optax.adam(0.1), NoScale()),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


@functools.cache
def wrapped_run(name):
    """Return (updates, state) after a good, a bad and a good step."""
    optimizer = loss_scaled(OPTIMIZERS[name](), DynamicScale(init_scale=1024.0))
    return run(optimizer, [FIRST, BAD, SECOND], lambda state: state.rule.scale)


@functools.cache
def plain_run(name):
    """Return (updates, state) after the good steps without `loss_scaled`."""
    inner = optax.with_extra_args_support(OPTIMIZERS[name]())
    return run(inner, [FIRST, SECOND], lambda state: jnp.float32(1.0))


def run(optimizer, steps, scale_in):
    # Not compiled as a whole: which sums are fused would differ, and the last digits.
    told = [(None, optimizer.init(PARAMS))]
    for grads in steps:
        state = told[-1][1]
        scaled = jax.tree.map(lambda grad: grad * scale_in(state), grads)  # noqa: B023
        told.append(optimizer.update(scaled, state, PARAMS, value=jnp.float32(2.0)))
    return told


def bits(tree):
    """Return the structure and every leaf's dtype and bytes."""
    leaves, structure = jax.tree.flatten(tree)
    held = [
        jax.random.key_data(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
        for leaf in map(jnp.asarray, leaves)
    ]
    return structure, [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in held]


@EACH
def test_a_skip_leaves_the_inner_state_bit_for_bit(name):
    _, (_, before), (_, after), _ = wrapped_run(name)
    assert not after.last.applied
    assert bits(after.inner) == bits(before.inner)


@EACH
def test_a_skip_gives_zeros_in_the_dtype_of_an_applied_step(name):
    _, (applied, _), (skipped, _), _ = wrapped_run(name)
    assert bits(skipped) == bits(jax.tree.map(jnp.zeros_like, applied))


@EACH
def test_an_applied_step_is_that_of_the_inner_optimizer(name):
    _, (updates, state), _, _ = wrapped_run(name)
    _, (true_updates, true_state), _ = plain_run(name)
    assert state.last.applied
    assert bits(updates) == bits(true_updates)
    assert bits(state.inner) == bits(true_state)


@EACH
def test_the_step_after_a_skip_is_as_if_there_had_been_none(name):
    updates, state = wrapped_run(name)[-1]
    true_updates, true_state = plain_run(name)[-1]
    assert float(state.last.scale) == 512.0
    assert bits(updates) == bits(true_updates)
    assert bits(state.inner) == bits(true_state)


@EACH
def test_a_state_keeps_its_structure_and_dtypes(name):
    kinds = [
        (jax.tree.structure(state), [leaf.dtype for leaf in jax.tree.leaves(state)])
        for _, state in wrapped_run(name)
    ]
    assert kinds[0] == kinds[1] == kinds[2] == kinds[3]


def test_the_comparison_sees_one_changed_bit():
    assert bits({"a": jnp.zeros(2)}) == bits({"a": jnp.zeros(2)})
    assert bits({"a": jnp.zeros(2)}) != bits({"a": -jnp.zeros(2)})
    assert bits({"a": jnp.zeros(2)}) != bits({"a": jnp.zeros(2, jnp.int32)})
    assert bits(jax.random.key(0)) != bits(jax.random.key(1))


# Schedules and hyperparameters


def test_a_schedule_counts_applied_steps_only():
    states = [state for _, state in wrapped_run("schedule")]
    counts = [int(optax.tree.get(state, "count")) for state in states]
    assert counts == [0, 1, 1, 2]


def test_an_injected_schedule_counts_applied_steps_only():
    states = [state for _, state in wrapped_run("hyperparams")]
    rates = [state.inner.hyperparams["learning_rate"] for state in states]
    # That of the last applied step.
    true_rates = [scheduled(jnp.int32(count)) for count in (0, 0, 0, 1)]
    assert rates == true_rates


def injected():
    """Return hyperparameters around loss_scaled: a factory that makes one."""

    def factory(learning_rate):
        return loss_scaled(optax.sgd(learning_rate), DynamicScale(init_scale=8.0))

    return optax.inject_hyperparams(factory)(learning_rate=0.5)


def test_hyperparameters_may_be_injected_around_loss_scaled():
    optimizer = injected()
    state = optimizer.init(jnp.ones(1))
    updates, state = optimizer.update(jnp.full(1, 16.0), state)
    assert updates.tolist() == [-1.0]
    state.hyperparams["learning_rate"] = jnp.float32(0.25)
    updates, state = optimizer.update(jnp.full(1, 16.0), state)
    assert updates.tolist() == [-0.5]


def test_the_scale_of_an_injected_factory_moves():
    optimizer = injected()
    updates, state = optimizer.update(jnp.full(1, INF), optimizer.init(jnp.ones(1)))
    assert updates.tolist() == [0.0]
    assert float(current_scale(state)) == 4.0


# Chains


def test_what_comes_before_sees_scaled_gradients_and_what_comes_after_does_not():
    seen = {}

    def note(place):
        def update(updates, state, params=None):
            seen[place] = float(updates[0])
            return updates, state

        return optax.GradientTransformation(lambda params: (), update)

    optimizer = optax.chain(
        note("before"),
        loss_scaled(optax.sgd(1.0), StaticScale(scale=8.0)),
        note("after"),
    )
    optimizer.update(jnp.full(1, 16.0), optimizer.init(jnp.ones(1)))
    assert seen == {"before": 16.0, "after": -2.0}


def test_a_moving_average_after_loss_scaled_sees_zeros_on_a_skip():
    optimizer = optax.chain(
        loss_scaled(optax.sgd(1.0), NoScale()), optax.ema(0.5, debias=False)
    )
    state = optimizer.init(jnp.ones(1))
    for grad in (-4.0, NAN):
        updates, state = optimizer.update(jnp.full(1, grad), state)
    assert updates.tolist() == [1.0]


def test_zero_nans_before_loss_scaled_hides_them_and_not_an_inf():
    optimizer = optax.chain(optax.zero_nans(), loss_scaled(optax.sgd(1.0), NoScale()))
    state = optimizer.init(jnp.ones(1))
    _, state = optimizer.update(jnp.full(1, NAN), state)
    assert last(state).applied
    _, state = optimizer.update(jnp.full(1, INF), state)
    assert not last(state).applied


# Parts of the parameters


def test_masked_outside_leaves_the_other_gradients_alone():
    inner = loss_scaled(optax.sgd(1.0), StaticScale(scale=8.0), max_norm=100.0)
    optimizer = optax.masked(inner, ONLY_W)
    params = {"w": jnp.ones(1), "b": jnp.ones(1)}
    grads = {"w": jnp.full(1, 16.0), "b": jnp.full(1, NAN)}
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    assert updates["w"].tolist() == [-2.0]
    assert updates["b"] is grads["b"]
    assert last(state).peaks.tolist() == [16.0]


def test_masked_outside_may_mask_every_leaf():
    optimizer = optax.masked(loss_scaled(optax.sgd(1.0), NoScale()), False)
    params = {"w": jnp.ones(1)}
    updates, state = optimizer.update(
        {"w": jnp.full(1, NAN)}, optimizer.init(params), params
    )
    assert np.isnan(updates["w"][0])
    assert last(state).applied


def test_partition_outside_scales_one_group_by_itself():
    optimizer = optax.multi_transform(
        {
            "half": loss_scaled(optax.sgd(1.0), DynamicScale(init_scale=8.0)),
            "frozen": optax.set_to_zero(),
        },
        {"w": "half", "b": "frozen"},
    )
    params = {"w": jnp.ones(1), "b": jnp.ones(1)}
    state = optimizer.init(params)
    grads = {"w": jnp.full(1, 16.0), "b": jnp.full(1, NAN)}
    updates, state = optimizer.update(grads, state, params)
    assert (updates["w"].tolist(), updates["b"].tolist()) == ([-2.0], [0.0])
    assert float(current_scale(state)) == 8.0


def test_partition_outside_with_two_scales_has_no_current_one():
    half = loss_scaled(optax.sgd(1.0), DynamicScale())
    optimizer = optax.multi_transform(
        {"one": half, "two": half}, {"w": "one", "b": "two"}
    )
    state = optimizer.init({"w": jnp.ones(1), "b": jnp.ones(1)})
    with pytest.raises(StateError, match="There are 2 states of loss_scaled"):
        current_scale(state)


def test_a_bad_gradient_of_a_frozen_leaf_skips_the_step_unless_masked():
    frozen = OPTIMIZERS["partition"]()
    grads = {"w": FIRST["w"], "b": jnp.full(3, NAN)}
    checked = loss_scaled(frozen, NoScale())
    _, state = checked.update(grads, checked.init(PARAMS), PARAMS)
    assert not last(state).applied
    spared = loss_scaled(frozen, NoScale(), mask=ONLY_W)
    updates, state = spared.update(grads, spared.init(PARAMS), PARAMS)
    assert last(state).applied
    assert updates["b"].tolist() == [0.0, 0.0, 0.0]


def test_optax_maps_over_the_parameters_in_the_state():
    optimizer = loss_scaled(optax.adam(0.1), DynamicScale(init_scale=8.0))
    state = optax.tree.map_params(
        optimizer, lambda leaf: leaf + 7.0, optimizer.init({"w": jnp.zeros(1)})
    )
    assert optax.tree.get(state, "mu")["w"].tolist() == [7.0]
    assert float(current_scale(state)) == 8.0


# Lookahead


def test_lookahead_outside_takes_the_inner_step():
    inner = loss_scaled(optax.sgd(0.5), StaticScale(scale=8.0))
    optimizer = optax.lookahead(inner, sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(1)})
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update({"w": jnp.full(1, 8.0)}, state, params)
        params = optax.apply_updates(params, updates)
    # Fast goes 1, 0.5, 0; slow goes half of the way to it, and fast follows.
    assert (params.fast["w"].tolist(), params.slow["w"].tolist()) == ([0.5], [0.5])
    assert int(last(state).step) == 2


def test_lookahead_inside_is_refused_with_the_way_out():
    optimizer = loss_scaled(optax.lookahead(optax.sgd(0.5), 2, 0.5), NoScale())
    params = optax.LookaheadParams.init_synced({"w": jnp.ones(1)})
    state = optimizer.init(params)
    with pytest.raises(GradientError, match=r"lookahead.*GS106"):
        optimizer.update({"w": jnp.ones(1)}, state, params)


# What is loaded, and when


def in_fresh_python(code):
    """Run code in an interpreter of its own; return what it printed."""
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


def test_importing_the_room_loads_none_of_the_libraries_around_jax():
    told = in_fresh_python(
        "import sys, gradscale.jax\n"
        "print([m for m in ('optax', 'flax', 'equinox', 'mpx') if m in sys.modules])"
    )
    assert told == "[]"


def test_everything_but_the_wrappers_works_without_optax():
    told = in_fresh_python(
        "import sys; sys.modules['optax'] = None\n"
        "import jax.numpy as jnp, gradscale.jax as gs\n"
        "from gradscale import DynamicScale\n"
        "state = gs.init(DynamicScale(init_scale=8.0))\n"
        "grad = gs.value_and_grad(lambda w: w * w)(state, 3.0)[1]\n"
        "print(float(grad), float(gs.update(DynamicScale(), state, False).scale))\n"
        "for name in ('loss_scaled', 'MultiSteps'):\n"
        "    try: getattr(gs, name)\n"
        "    except ImportError as error: print(error)\n"
    )
    numbers, *errors = told.splitlines()
    assert numbers == "6.0 4.0"
    assert errors == [
        f"gradscale.jax.{name} wraps optimizers of optax, which is not installed. "
        "Run pip install 'gradscale[jax]'."
        for name in ("loss_scaled", "MultiSteps")
    ]


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'gradscale\.jax' has no attribute 'no'"):
        gradscale.jax.__getattr__("no")
