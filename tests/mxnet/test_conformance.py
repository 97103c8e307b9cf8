"""The scales of an MXNet run are those of the Python reference."""

import random

import pytest

from gradscale import PYTHON, DynamicScale, NoScale, Observed, StaticScale
from gradscale.mxnet import amp
from tests.mxnet.nets import INF, NAN, parameter, step, trainer_of
from tests.strategies import any_policy, binary_policy, flags

STEPS = 40


def python_scales(policy, trace):
    state, scales = policy.init_state(), []
    for finite in trace:
        scales.append(state.scale)
        state = policy.next_state(state, Observed(finite, 1.0, True), PYTHON.where)
    return scales


def mxnet_scales(policy, trace, devices=1):
    """Return the scales of a run whose gradients are finite where the trace is."""
    weight = parameter(devices=devices)
    trainer = trainer_of(weight)
    scaler = amp.init_loss_scaling(trainer, policy)
    scales, rng = [], random.Random(1)
    for finite in trace:
        scales.append(scaler.loss_scale)
        factors = [0.0] * devices
        if not finite:
            factors[rng.randrange(devices)] = rng.choice((INF, -INF, NAN))
        try:
            step("gradscale", trainer, factors)
        except FloatingPointError:
            # Three steps at the floor; the scale stays there.
            assert scaler.loss_scale == policy.min_scale
        assert scaler.last.applied == finite
    return scales


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("draw", [any_policy, binary_policy])
def test_random_traces_give_the_scales_of_the_reference(draw, seed):
    rng = random.Random(seed)
    policy, trace = draw(rng), flags(rng, STEPS)
    scales = mxnet_scales(policy, trace, devices=1 + seed % 3)
    assert scales == python_scales(policy, trace)


@pytest.mark.parametrize("policy", [StaticScale(scale=8.0), NoScale()])
def test_a_fixed_scale_skips_and_stays(policy):
    trace = [True, False, False, False, False, True]
    assert mxnet_scales(policy, trace) == [policy.min_scale] * len(trace)


def test_the_comparison_can_fail():
    trace = [True] * 3
    one, other = DynamicScale(growth_interval=2), DynamicScale(growth_interval=3)
    assert mxnet_scales(one, trace) != python_scales(other, trace)
