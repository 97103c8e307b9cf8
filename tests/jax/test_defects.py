"""What jmp, flax and MPX get wrong, and `gradscale.jax` right.

A scenario takes a scaler and fails where the scaler does. Each is run on all of them:
those that are named must fail, for the reason that is given, and all others must pass.
"""

import jax
import jax.numpy as jnp
import pytest

from tests.jax.scalers import SCALERS

SCENARIOS = []


def fail(*names, error=AssertionError, words):
    """Enter a scenario and who fails it, and how."""

    def enter(scenario):
        SCENARIOS.append((scenario, names, error, words))
        return scenario

    return enter


def product(weight, factor):
    return weight * factor


def run(scaler, factors, jit=False):
    """Take steps with these factors as gradients; return each step's results."""
    state, results = scaler.state, []

    def one(state, factor):
        return scaler.step(state, product, jnp.float32(1.0), factor)

    one = jax.jit(one) if jit else one
    for factor in factors:
        state, finite, loss, grad = one(state, jnp.float32(factor))
        results.append((scaler.scale_of(state), bool(finite), float(loss), float(grad)))
    return results


INF = float("inf")


@fail("MPX", words="0.25 == 0.5")
def the_gradient_of_the_step_that_grows_the_scale_is_exact(kind):
    grads = [result[3] for result in run(kind(scale=16.0, interval=2), [0.5] * 3)]
    assert grads[1] == 0.5


@fail("flax", words="16.0 == 32.0")
def the_scale_grows_on_the_step_that_was_asked_for(kind):
    scales = [result[0] for result in run(kind(scale=16.0, interval=3), [0.5] * 3)]
    assert scales[2] == 32.0


@fail("jmp", words="1.0 == 0.125")
def the_floor_holds_under_jit(kind):
    scales = [r[0] for r in run(kind(scale=1.0, floor=0.125), [INF] * 9, jit=True)]
    assert scales[-1] == 0.125


@fail("jmp", "flax", words="2 == 1")
def a_jitted_step_is_traced_once(kind):
    scaler, traces = kind(scale=16.0), []

    @jax.jit
    def step(state, factor):
        traces.append(1)
        return scaler.step(state, product, jnp.float32(1.0), factor)[0]

    state = scaler.state
    for _ in range(5):
        state = step(state, jnp.float32(0.5))
    assert len(traces) == 1


@fail("jmp", words="0.0 == ")
def an_f16_gradient_survives_the_unscale(kind):
    scaler = kind(scale=2.0**15)

    # Scaled, the gradient is 2^-12, a normal f16; unscaled, f16 has no such number.
    def loss(weight):
        return weight.astype(jnp.float32) * 2.0**-27

    _, _, _, grad = scaler.step(scaler.state, loss, jnp.float16(1.0))
    assert float(grad) == 2.0**-27


@fail("flax", error=TypeError, words="unexpected keyword argument")
def keyword_arguments_reach_the_loss(kind):
    scaler = kind(scale=16.0)
    one = jnp.float32(1.0)
    _, _, _, grad = scaler.step(scaler.state, product, one, factor=jnp.float32(0.5))
    assert float(grad) == 0.5


@fail("MPX", words="False")
def a_scale_above_the_largest_f16_is_used_where_the_loss_is_f32(kind):
    scaler = kind(scale=2.0**17)

    def loss(weight):
        return weight.astype(jnp.float32) * 2.0**-10

    _, finite, _, grad = scaler.step(scaler.state, loss, jnp.float32(1.0))
    assert finite
    assert float(grad) == 2.0**-10


@fail("jmp", words="0.0 == 0.5")
def gradients_survive_200_growths(kind):
    scaler = kind(scale=2.0**15, interval=1)

    @jax.jit
    def step(state, weight):
        state, _, _, grad = scaler.step(state, lambda w: (w * w).sum(), weight)
        return state, grad

    state = scaler.state
    # Twice as many steps: flax grows on every second one.
    for _ in range(400):
        state, grad = step(state, jnp.full(8, 0.25))
    assert float(grad[0]) == 0.5


@fail("flax", words=r"\(True, 0.0, 0.0\) == \(True, 0.5, 0.5\)")
def gradients_survive_200_overflows(kind):
    results = run(kind(), [INF] * 200 + [0.5])
    assert results[-1][1:] == (True, 0.5, 0.5)


# Elsewhere the scale and its inverse may be subnormal, and they pass.
FLUSHED = {"gradients_survive_200_growths", "gradients_survive_200_overflows"}
CASES = [
    pytest.param(scenario, name, names, error, words, id=f"{scenario.__name__}-{name}")
    for scenario, names, error, words in SCENARIOS
    for name in SCALERS
]


@pytest.mark.parametrize(("scenario", "name", "failing", "error", "words"), CASES)
def test_a_scaler_passes_or_fails_as_it_is_said(scenario, name, failing, error, words):
    if name not in failing:
        scenario(SCALERS[name])
        return
    if scenario.__name__ in FLUSHED and jax.default_backend() != "cpu":
        pytest.skip("XLA flushes subnormals on the CPU only")
    with pytest.raises(error, match=words):
        scenario(SCALERS[name])


def test_gradscale_is_never_among_those_that_fail():
    assert not any("gradscale" in names for _, names, _, _ in SCENARIOS)
