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

# A step without a compiler takes the torch backend milliseconds.
STEPS = 5 if BACKEND == "torch" else 10


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


def tensorflow_run(optimizer, weight, fill):
    import tensorflow as tf

    first = [v.numpy() for v in optimizer.variables]

    @tf.function(jit_compile=True)
    def run(fill):
        count, steps = fill.shape[:2]
        scales = tf.TensorArray(tf.float32, count * steps, element_shape=())
        for trace in tf.range(count):
            for variable, value in zip(optimizer.variables, first, strict=True):
                variable.assign(value)
            for step in tf.range(steps):
                optimizer.apply([fill[trace, step]], [weight])
                scale = optimizer.dynamic_scale.value
                scales = scales.write(trace * steps + step, scale)
        return tf.reshape(scales.stack(), (count, steps))

    return run(tf.constant(fill)).numpy().tolist()


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


def torch_run(optimizer, weight, fill):
    import torch

    first = [(v, v.value.detach().clone()) for v in optimizer.variables]
    scales = []
    for trace in torch.tensor(fill):
        for variable, value in first:
            variable.assign(value)
        for grad in trace:
            optimizer.apply([grad], [weight])
            scales.append(optimizer.dynamic_scale.value.detach().clone())
    return torch.stack(scales).reshape(fill.shape[:2]).tolist()


RUNS = {"tensorflow": tensorflow_run, "jax": jax_run, "torch": torch_run}


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


def test_eager_steps_give_the_scales_of_python():
    policy = DynamicScale(init_scale=8.0, growth_interval=2, min_scale=2.0)
    rng = random.Random(0)
    trace = flags(rng, 20)
    weight = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), policy=policy)
    optimizer.build([weight])
    scales = []
    for finite in trace:
        grad = ops.convert_to_tensor([1.0 if finite else float("inf")])
        optimizer.apply([grad], [weight])
        scales.append(optimizer.scale)
    assert scales == python_scales(policy, trace)


def test_tolerance_and_bounds_give_the_scales_of_python():
    policy = DynamicScale(
        init_scale=8.0, growth_interval=2, min_scale=2.0, max_scale=32.0, tolerance=0.25
    )
    rng = random.Random(0)
    traces = [flags(rng, STEPS) for _ in range(50)]
    expected = [python_scales(policy, trace) for trace in traces]
    assert optimizer_scales(policy, traces) == expected
