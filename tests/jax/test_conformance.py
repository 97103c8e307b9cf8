"""The scales of a compiled JAX run are those of Python and of torch."""

import math
import random

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

from gradscale import PYTHON, DynamicScale, Observed
from gradscale.jax import init, loss_scaled, update
from tests.strategies import any_policy, binary_policy, flags

STEPS = 30


def python_scales(policy, trace):
    state, scales = policy.init_state(), []
    for finite in trace:
        state = policy.next_state(state, Observed(finite, 1.0, True), PYTHON.where)
        scales.append(state.scale)
    return scales


def torch_scales(policy, trace):
    """Return the scales of the operator inside `torch.amp.GradScaler`."""
    scale, count = torch.tensor(policy.init_scale), torch.tensor(0, dtype=torch.int32)
    scales = []
    for finite in trace:
        found = torch.tensor(0.0 if finite else 1.0)
        torch._amp_update_scale_(
            scale,
            count,
            found,
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
        )
        scales.append(scale.item())
    return scales


def rule_scales(policy, traces):
    """Return the scales of `update` under jit: [trace][step]."""

    def step(state, finite):
        state = update(policy, state, finite)
        return state, state.scale

    run = jax.jit(jax.vmap(lambda trace: jax.lax.scan(step, init(policy), trace)[1]))
    return run(jnp.array(traces)).tolist()


def optimizer_scales(policy, traces):
    """Return the scales of `loss_scaled` fed with real gradients: [trace][step]."""
    optimizer = loss_scaled(optax.sgd(0.1), policy)
    params = {"w": jnp.ones(2)}

    def step(carry, finite):
        params, state = carry
        bad = {"w": jnp.where(finite, jnp.ones(2), jnp.array([1.0, math.inf]))}
        updates, state = optimizer.update(bad, state, params)
        return (optax.apply_updates(params, updates), state), state.rule.scale

    def run(trace):
        return jax.lax.scan(step, (params, optimizer.init(params)), trace)[1]

    return jax.jit(jax.vmap(run))(jnp.array(traces)).tolist()


ROUTES = {"update": rule_scales, "loss_scaled": optimizer_scales}


def test_another_policy_gives_other_scales():
    policy, other = DynamicScale(growth_interval=2), DynamicScale(growth_interval=3)
    trace = [True] * 3
    assert rule_scales(policy, [trace])[0] != torch_scales(other, trace)


# A thousand traces by each of two routes. Each policy is a program of its own; that of
# `loss_scaled` takes twice as long to compile, and has the same rule in it.
POLICIES = {"update": 10, "loss_scaled": 4}


@pytest.mark.parametrize(
    ("route", "seed"),
    [(route, seed) for route, count in POLICIES.items() for seed in range(count)],
)
def test_a_thousand_traces_give_the_scales_of_python_and_of_torch(route, seed):
    rng = random.Random(seed)
    policy = binary_policy(rng)
    traces = [flags(rng, STEPS) for _ in range(1000 // POLICIES[route])]
    scales = ROUTES[route](policy, traces)
    assert scales == [python_scales(policy, trace) for trace in traces]
    assert scales == [torch_scales(policy, trace) for trace in traces]


@pytest.mark.parametrize("route", ROUTES)
def test_tolerance_and_bounds_give_the_scales_of_python(route):
    policy = DynamicScale(
        init_scale=8.0, growth_interval=2, min_scale=2.0, max_scale=32.0, tolerance=0.25
    )
    rng = random.Random(0)
    traces = [flags(rng, 60) for _ in range(50)]
    scales = ROUTES[route](policy, traces)
    assert scales == [python_scales(policy, trace) for trace in traces]


def ulps(a, b):
    return abs(a - b) / math.ulp(max(a, b)) / 2.0**29


@pytest.mark.parametrize("seed", range(5))
def test_odd_factors_move_as_in_python_to_one_ulp_a_move(seed):
    rng = random.Random(seed)
    policy = any_policy(rng)
    while policy.max_scale > 2.0**126:
        policy = any_policy(rng)
    trace = flags(rng, STEPS)
    ours, python = rule_scales(policy, [trace])[0], python_scales(policy, trace)
    # f32 has 29 bits less than a Python float; each step may move once.
    for step, (a, b) in enumerate(zip(ours, python, strict=True), start=1):
        assert ulps(a, b) <= step
