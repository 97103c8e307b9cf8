"""The scales of an optimizer that trains are those of Python, on every backend."""

import random

import keras
import numpy as np
import pytest
from keras import ops

from gradscale import PYTHON, DynamicScale, Observed
from gradscale.keras import LossScaleOptimizer
from tests.keras.backends.steps import BACKEND
from tests.strategies import binary_policy, flags

STEPS = 10


def python_scales(policy, trace):
    state, scales = policy.init_state(), []
    for finite in trace:
        state = policy.next_state(state, Observed(finite, 1.0, True), PYTHON.where)
        scales.append(state.scale)
    return scales


def optimizer_scales(policy, traces):
    """Return the scales of an optimizer fed with gradients: [trace][step]."""
    weight = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=policy)
    optimizer.build([weight])
    fill = np.where(np.array(traces), 1.0, np.inf).astype("float32")[:, :, None]
    return RUNS[BACKEND](optimizer, weight, fill)


def eager_run(optimizer, weight, fill):
    first = [ops.convert_to_numpy(v.value).copy() for v in optimizer.variables]
    scales = []
    for trace in fill:
        for variable, value in zip(optimizer.variables, first, strict=True):
            variable.assign(value)
        found = []
        for grad in trace:
            optimizer.apply([ops.convert_to_tensor(grad)], [weight])
            found.append(optimizer.scale)
        scales.append(found)
    return scales


def tensorflow_run(optimizer, weight, fill):
    import tensorflow as tf

    first = [v.numpy() for v in optimizer.variables]

    @tf.function
    def run(trace):
        scales = tf.TensorArray(tf.float32, STEPS)
        for step in tf.range(STEPS):
            optimizer.apply([trace[step]], [weight])
            scales = scales.write(step, optimizer.dynamic_scale.value)
        return scales.stack()

    found = []
    for trace in fill:
        for variable, value in zip(optimizer.variables, first, strict=True):
            variable.assign(value)
        found.append(run(tf.constant(trace)).numpy().tolist())
    return found


def jax_run(optimizer, weight, fill):
    import jax

    place = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True)
    first = [v.value for v in optimizer.variables]

    def step(carry, grad):
        trained, inside = optimizer.stateless_apply(carry[1], [grad], carry[0])
        return (trained, inside), inside[place]

    def run(trace):
        return jax.lax.scan(step, ([weight.value], first), trace)[1]

    return jax.jit(jax.vmap(run))(fill).tolist()


RUNS = {"tensorflow": tensorflow_run, "jax": jax_run, "torch": eager_run}


def test_another_policy_gives_other_scales():
    policy, other = DynamicScale(growth_interval=2), DynamicScale(growth_interval=3)
    trace = [True] * STEPS
    assert optimizer_scales(policy, [trace])[0] != python_scales(other, trace)


# 4 policies of 250 traces each.
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_traces_give_the_scales_of_python(seed):
    rng = random.Random(seed)
    policy = binary_policy(rng)
    traces = [flags(rng, STEPS) for _ in range(250)]
    expected = [python_scales(policy, trace) for trace in traces]
    assert optimizer_scales(policy, traces) == expected


def test_tolerance_and_bounds_give_the_scales_of_python():
    policy = DynamicScale(
        init_scale=8.0, growth_interval=2, min_scale=2.0, max_scale=32.0, tolerance=0.25
    )
    rng = random.Random(0)
    traces = [flags(rng, STEPS) for _ in range(50)]
    expected = [python_scales(policy, trace) for trace in traces]
    assert optimizer_scales(policy, traces) == expected
