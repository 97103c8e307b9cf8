"""One rule everywhere: Python, PyTorch, JAX and Keras give the scales of torch."""

import csv
import json
import math
import os
import random
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

from gradscale import PYTHON, DynamicScale, Observed, ScaleState
from tests.strategies import any_policy, binary_policy, flags

DATA = Path(__file__).parents[1] / "data"
STEPS = 30


def seen(finite):
    return Observed(finite, 1.0, True)


def bits(value):
    """Return the f32 bit pattern: neighbours differ by one."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def ulps_apart(a, b):
    return abs(bits(a) - bits(b))


def python_scales(policy, trace):
    state, scales = policy.init_state(), []
    for finite in trace:
        state = policy.next_state(state, seen(finite), PYTHON.where)
        scales.append(state.scale)
    return scales


FOUND = {True: torch.tensor(0.0), False: torch.tensor(1.0)}


def move_by_op(policy, scale, tracker, finite):
    """Move torch's two tensors by torch's own operator."""
    torch._amp_update_scale_(
        scale,
        tracker,
        FOUND[finite],
        policy.growth_factor,
        policy.backoff_factor,
        policy.growth_interval,
    )


def op_scales(policy, trace):
    scale = torch.tensor(policy.init_scale)
    tracker = torch.tensor(0, dtype=torch.int32)
    scales = []
    for finite in trace:
        move_by_op(policy, scale, tracker, finite)
        scales.append(scale.item())
    return scales


# --- the helpers can tell a difference ------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "ulps"),
    [
        (1.0, 1.0, 0),
        (1.0, 1.0 + 2.0**-23, 1),
        (1.0, 1.0 - 2.0**-24, 1),
        (1.0, 1.0 + 2.0**-21, 4),
        (1.0, 2.0, 2**23),
    ],
)
def test_ulps_are_counted(a, b, ulps):
    assert ulps_apart(a, b) == ulps


def test_another_rule_gives_other_scales():
    policy = DynamicScale(growth_interval=2)
    other = DynamicScale(growth_interval=3)
    assert python_scales(policy, [True] * 3) != op_scales(other, [True] * 3)


# --- PYTHON against torch -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_python_gives_the_scales_of_torchs_operator_bit_for_bit(seed):
    rng = random.Random(seed)
    # 10 x 1000 sequences.
    for _ in range(1000):
        policy, trace = binary_policy(rng), flags(rng, STEPS)
        ours, theirs = python_scales(policy, trace), op_scales(policy, trace)
        assert ours == theirs, (policy, trace)


def scaler_scales(policy, trace):
    """Return the scales of a real `torch.amp.GradScaler` that trains."""
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=policy.init_scale,
        growth_factor=policy.growth_factor,
        backoff_factor=policy.backoff_factor,
        growth_interval=policy.growth_interval,
    )
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scales = []
    for finite in trace:
        optimizer.zero_grad()
        factor = 1.0 if finite else math.inf
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("seed", range(20))
def test_python_gives_the_scales_of_torchs_class_bit_for_bit(seed):
    rng = random.Random(1000 + seed)
    # 20 x 10 sequences.
    for _ in range(10):
        policy, trace = binary_policy(rng), flags(rng, 20)
        ours, theirs = python_scales(policy, trace), scaler_scales(policy, trace)
        assert ours == theirs, (policy, trace)


def test_the_default_policy_follows_torch_over_a_growth_interval():
    policy = DynamicScale()
    trace = [False, *[True] * 2000, False, *[True] * 1999, False]
    assert python_scales(policy, trace) == op_scales(policy, trace)


# --- other frameworks against PYTHON --------------------------------------------------


def traces_of(seed, count):
    """Return a policy, traces for it, and PYTHON's scales: [sequence][step]."""
    rng = random.Random(seed)
    policy = binary_policy(rng)
    traces = [flags(rng, STEPS) for _ in range(count)]
    return policy, traces, [python_scales(policy, trace) for trace in traces]


@pytest.mark.parametrize("seed", range(10))
def test_torch_tensors_give_the_scales_of_python_bit_for_bit(seed):
    policy, traces, expected = traces_of(seed, 200)
    finite = torch.tensor(traces)
    counts = torch.zeros(len(traces), dtype=torch.int32)
    state = ScaleState(torch.full((len(traces),), policy.init_scale), counts, counts)
    scales = []
    for step in range(STEPS):
        state = policy.next_state(state, seen(finite[:, step]), torch.where)
        scales.append(state.scale)
    assert torch.stack(scales, dim=1).tolist() == expected


@pytest.mark.parametrize("seed", range(10))
def test_jax_arrays_give_the_scales_of_python_bit_for_bit(seed):
    policy, traces, expected = traces_of(seed, 200)
    finite = jnp.array(traces)
    counts = jnp.zeros(len(traces), jnp.int32)
    first = jnp.full(len(traces), policy.init_scale, jnp.float32)
    state = ScaleState(first, counts, counts)
    step = jax.jit(lambda state, flag: policy.next_state(state, seen(flag), jnp.where))
    scales = []
    for place in range(STEPS):
        state = step(state, finite[:, place])
        scales.append(state.scale)
    assert jnp.stack(scales, axis=1).tolist() == expected


KERAS_RUN = """
import json, sys
import keras
from keras import ops
from gradscale import DynamicScale, Observed, ScaleState

assert keras.backend.backend() == sys.argv[1]
results = []
for settings, trace in json.load(sys.stdin):
    policy = DynamicScale(**settings)
    state = ScaleState(
        ops.convert_to_tensor(policy.init_scale, "float32"),
        ops.convert_to_tensor(0, "int32"),
        ops.convert_to_tensor(0, "int32"),
    )
    scales = []
    for finite in trace:
        seen = Observed(ops.convert_to_tensor(finite), 1.0, True)
        state = policy.next_state(state, seen, ops.where)
        scales.append(float(state.scale))
    dtypes = [keras.backend.standardize_dtype(leaf.dtype) for leaf in state]
    results.append([scales, dtypes])
print(json.dumps(results))
"""


# The other backends: tests/keras/backends/test_conformance.py.
def test_keras_gives_the_scales_of_python_bit_for_bit():
    rng = random.Random(7)
    policies = [binary_policy(rng) for _ in range(4)]
    policies.append(DynamicScale(growth_interval=3, tolerance=0.25))
    cases = [(policy, flags(rng, STEPS)) for policy in policies]
    done = subprocess.run(
        [sys.executable, "-c", KERAS_RUN, "jax"],
        input=json.dumps([(vars(policy), trace) for policy, trace in cases]),
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    dtypes = ["float32", "int32", "int32"]
    expected = [[python_scales(policy, trace), dtypes] for policy, trace in cases]
    assert json.loads(done.stdout) == expected


# --- tolerance and bounds, which torch does not have ----------------------------------


def random_cases(seed):
    rng = random.Random(seed)
    policy = any_policy(rng)
    return policy, flags(rng, 60)


@pytest.mark.parametrize("seed", range(20))
def test_torch_counts_and_stays_in_bounds_as_python_does(seed):
    policy, trace = random_cases(seed)
    python = policy.init_state()
    state = ScaleState(
        torch.tensor(python.scale),
        torch.tensor(0, dtype=torch.int32),
        torch.tensor(0, dtype=torch.int32),
    )
    for finite in trace:
        python = policy.next_state(python, seen(finite), PYTHON.where)
        flag = seen(torch.tensor(finite))
        state = policy.next_state(state, flag, torch.where)
        assert (state.finite_steps.item(), state.debt.item()) == python[1:]
        assert policy.min_scale <= state.scale.item() <= policy.max_scale


@pytest.mark.parametrize("seed", range(10))
def test_jax_counts_and_stays_in_bounds_as_python_does(seed):
    policy, trace = random_cases(seed)
    python = policy.init_state()
    state = ScaleState(jnp.float32(python.scale), jnp.int32(0), jnp.int32(0))
    step = jax.jit(lambda state, flag: policy.next_state(state, seen(flag), jnp.where))
    for finite in trace:
        python = policy.next_state(python, seen(finite), PYTHON.where)
        state = step(state, finite)
        assert (int(state.finite_steps), int(state.debt)) == python[1:]
        assert policy.min_scale <= float(state.scale) <= policy.max_scale


# --- factors that are not powers of two -----------------------------------------------


def odd_move(seed, count=500):
    """Return a policy with odd factors, and scales to move from, both ways."""
    rng = random.Random(seed)
    policy = DynamicScale(
        growth_factor=rng.uniform(1.001, 5.0),
        backoff_factor=rng.uniform(0.1, 0.999),
        growth_interval=1,
    )
    scales = torch.tensor([2.0 ** rng.uniform(-15.0, 100.0) for _ in range(count)])
    return policy, scales.tolist(), [rng.random() < 0.5 for _ in range(count)]


def python_moves(policy, scales, finite):
    return [
        policy.next_state(ScaleState(scale, 0, 0), seen(flag), PYTHON.where).scale
        for scale, flag in zip(scales, finite, strict=True)
    ]


def most_ulps(ours, theirs):
    return max(ulps_apart(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_python_moves_as_torchs_operator_to_one_ulp(seed):
    policy, scales, finite = odd_move(seed)
    theirs = []
    for before, flag in zip(scales, finite, strict=True):
        scale = torch.tensor(before)
        move_by_op(policy, scale, torch.tensor(0, dtype=torch.int32), flag)
        theirs.append(scale.item())
    assert most_ulps(python_moves(policy, scales, finite), theirs) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_torch_tensors_move_as_python_to_one_ulp(seed):
    policy, scales, finite = odd_move(seed)
    counts = torch.zeros(len(scales), dtype=torch.int32)
    state = ScaleState(torch.tensor(scales), counts, counts)
    moved = policy.next_state(state, seen(torch.tensor(finite)), torch.where)
    assert most_ulps(python_moves(policy, scales, finite), moved.scale.tolist()) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_jax_arrays_move_as_python_to_one_ulp(seed):
    policy, scales, finite = odd_move(seed)
    counts = jnp.zeros(len(scales), jnp.int32)
    state = ScaleState(jnp.array(scales, jnp.float32), counts, counts)
    step = jax.jit(lambda state, flag: policy.next_state(state, seen(flag), jnp.where))
    moved = step(state, jnp.array(finite))
    assert most_ulps(python_moves(policy, scales, finite), moved.scale.tolist()) <= 1


# --- types ----------------------------------------------------------------------------


def test_torch_scalars_keep_dtype_and_shape():
    policy = DynamicScale(growth_interval=2, tolerance=0.3)
    count = torch.tensor(0, dtype=torch.int32)
    state = ScaleState(torch.tensor(policy.init_scale), count, count)
    for finite in (True, True, False, False, True):
        state = policy.next_state(state, seen(torch.tensor(finite)), torch.where)
    kinds = [(leaf.dtype, leaf.shape) for leaf in state]
    shape = torch.Size([])
    assert kinds == [(torch.float32, shape), (torch.int32, shape), (torch.int32, shape)]


def test_jax_scalars_keep_a_strong_dtype():
    policy = DynamicScale(growth_interval=2, tolerance=0.3)
    state = ScaleState(jnp.float32(policy.init_scale), jnp.int32(0), jnp.int32(0))
    step = jax.jit(lambda state, flag: policy.next_state(state, seen(flag), jnp.where))
    for finite in (True, True, False, False, True):
        state = step(state, finite)
    kinds = [(leaf.dtype.name, leaf.weak_type) for leaf in state]
    assert kinds == [("float32", False), ("int32", False), ("int32", False)]


def test_jax_compiles_once_over_a_run():
    policy = DynamicScale(growth_interval=2, tolerance=0.3)
    traced = []

    @jax.jit
    def step(state, flag):
        traced.append(1)
        return policy.next_state(state, seen(flag), jnp.where)

    state = ScaleState(jnp.float32(policy.init_scale), jnp.int32(0), jnp.int32(0))
    for finite in flags(random.Random(0), 50):
        state = step(state, finite)
    assert len(traced) == 1


def test_the_rule_runs_inside_a_scan():
    policy = DynamicScale(init_scale=8.0, growth_interval=2)
    trace = [True, True, False, True, True]

    def step(state, flag):
        state = policy.next_state(state, seen(flag), jnp.where)
        return state, state.scale

    first = ScaleState(jnp.float32(8.0), jnp.int32(0), jnp.int32(0))
    _, scales = jax.lax.scan(step, first, jnp.array(trace))
    assert scales.tolist() == python_scales(policy, trace)


# --- recorded traces ------------------------------------------------------------------


def safe_exponents(run):
    with (DATA / f"{run}.csv").open(encoding="utf-8") as file:
        return [int(row["log2_safe"]) for row in csv.DictReader(file)]


REPLAY = DynamicScale(growth_interval=20)


def replay(first, move, exponents):
    """Return the scales of a run whose overflows depend on its scale."""
    state, scales = first, []
    for exponent in exponents:
        state = move(state, float(state[0]) <= 2.0**exponent)
        scales.append(float(state[0]))
    return scales


def replay_python(exponents):
    def move(state, finite):
        return REPLAY.next_state(state, seen(finite), PYTHON.where)

    return replay(REPLAY.init_state(), move, exponents)


def replay_op(exponents):
    def move(state, finite):
        move_by_op(REPLAY, *state, finite)
        return state

    count = torch.tensor(0, dtype=torch.int32)
    return replay((torch.tensor(REPLAY.init_scale), count), move, exponents)


def replay_torch(exponents):
    def move(state, finite):
        return REPLAY.next_state(state, seen(torch.tensor(finite)), torch.where)

    count = torch.tensor(0, dtype=torch.int32)
    scale = torch.tensor(REPLAY.init_scale)
    return replay(ScaleState(scale, count, count), move, exponents)


def replay_jax(exponents):
    move = jax.jit(lambda state, flag: REPLAY.next_state(state, seen(flag), jnp.where))
    first = ScaleState(jnp.float32(REPLAY.init_scale), jnp.int32(0), jnp.int32(0))
    return replay(first, move, exponents)


@pytest.mark.parametrize("run", ["vit", "rl_heavy_tail"])
@pytest.mark.parametrize("through", [replay_op, replay_torch, replay_jax])
def test_a_recorded_run_gives_the_same_scales_through(through, run):
    exponents = safe_exponents(run)
    assert through(exponents) == replay_python(exponents)


@pytest.mark.parametrize("run", ["vit", "rl_heavy_tail"])
def test_a_recorded_run_makes_the_scale_move_both_ways(run):
    scales = replay_python(safe_exponents(run))
    pairs = list(pairwise(scales))
    assert len(scales) == 300
    assert sum(after > before for before, after in pairs) >= 5
    assert sum(after < before for before, after in pairs) >= 5
