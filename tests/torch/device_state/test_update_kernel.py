"""The kernel that ends a step writes what the plain operations write."""

import csv
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale import PYTHON, DynamicScale, NoScale, Observed, StaticScale
from gradscale.core.policies import HIGHEST_SCALE, LOWEST_SCALE
from gradscale.core.state import ScaleState
from gradscale.torch import GradScaler
from gradscale.torch.device_state.layout import RING, ROW
from tests.strategies import any_policy
from tests.torch.device_state.update_case import UpdateCase
from tests.torch.training import INF, NAN, parameter, planted

# The interpreter computes by NumPy, which warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

DATA = Path(__file__).parents[2] / "data"


POWERS = st.integers(-126, 127).map(lambda power: 2.0**power)


@st.composite
def binary_policies(draw):
    low, first, high = sorted(draw(st.tuples(POWERS, POWERS, POWERS)))
    return DynamicScale(
        init_scale=first,
        min_scale=low,
        max_scale=draw(st.sampled_from([high, HIGHEST_SCALE])),
        growth_factor=draw(st.sampled_from([2.0, 4.0, 2.0**30])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 2.0**-30])),
        growth_interval=draw(st.integers(1, 4)),
        tolerance=draw(st.sampled_from([0.0, 0.1, 0.3, 0.49])),
    )


@given(policy=binary_policies(), flags=st.lists(st.booleans(), max_size=25))
@settings(max_examples=40)
def test_the_state_moves_by_the_rule_bit_for_bit(device, policy, flags):
    case, plain = UpdateCase(policy, device, "triton"), policy.init_state()
    for finite in flags:
        case.end(float(not finite))
        plain = policy.next_state(plain, Observed(finite, 1.0, True), PYTHON.where)
        assert case.plain_scaling() == tuple(plain)


@pytest.mark.parametrize("run", ["vit", "rl_heavy_tail"])
def test_a_recorded_run_gives_the_scales_of_the_rule(device, run):
    policy = DynamicScale(growth_interval=20)
    case, plain = UpdateCase(policy, device, "triton"), policy.init_state()
    with (DATA / f"{run}.csv").open(encoding="utf-8") as file:
        exponents = [int(row["log2_safe"]) for row in csv.DictReader(file)]
    if device.type == "cpu":
        # The interpreter takes long for a step; four scales and overflows are in these.
        exponents = exponents[:200]
    scales, expected = [], []
    for exponent in exponents:
        finite = plain.scale <= 2.0**exponent
        case.end(float(not finite))
        plain = policy.next_state(plain, Observed(finite, 1.0, True), PYTHON.where)
        scales.append(case.scaling.scale.item())
        expected.append(plain.scale)
    assert scales == expected
    assert len(set(scales)) > 3


@pytest.mark.parametrize("seed", range(20))
def test_other_factors_move_within_one_ulp_a_move(device, seed):
    rng = random.Random(seed)
    policy = any_policy(rng)
    case = UpdateCase(policy, device, "triton")
    for _ in range(10):
        before, finite = ScaleState(*case.plain_scaling()), rng.random() < 0.6
        case.end(float(not finite))
        seen = Observed(finite, 1.0, True)
        plain = policy.next_state(before, seen, PYTHON.where)
        ulp = plain.scale * 2.0**-23
        assert abs(case.scaling.scale.item() - plain.scale) <= ulp
        assert case.plain_scaling()[1:] == plain[1:]
        assert policy.min_scale <= case.scaling.scale.item() <= policy.max_scale


NUMBERS = st.sampled_from([0.0, 1.5, 2.0**100, INF, NAN])
STEPS = st.fixed_dictionaries(
    {
        "skip": st.sampled_from([0.0, 1.0]),
        "nonfinite": st.sampled_from([0.0, 1.0]),
        "norm_unusable": st.sampled_from([None, 0.0, 1.0]),
        "norm": st.none() | NUMBERS,
        "amax": st.none() | NUMBERS,
        "loss_trace": st.sampled_from([0.0, NAN]),
        "refused": st.sampled_from([0.0, 1.0]),
        "loss": NUMBERS,
        "scale": st.sampled_from([8.0, 3.0]),
        "stepped": st.booleans(),
    }
)
FEW_POLICIES = st.sampled_from(
    [
        DynamicScale(init_scale=2.0, min_scale=1.0, growth_interval=2),
        DynamicScale(init_scale=8.0, min_scale=4.0, tolerance=0.3, growth_interval=3),
        DynamicScale(init_scale=8.0, min_scale=8.0, max_scale=8.0),
        StaticScale(scale=8.0),
        NoScale(),
    ]
)


@given(
    policy=FEW_POLICIES,
    hold=st.booleans(),
    steps=st.lists(STEPS, min_size=1, max_size=9),
)
@settings(max_examples=60)
def test_every_tensor_equals_that_of_the_plain_operations(device, policy, hold, steps):
    by_kernel, by_torch = (
        UpdateCase(policy, device, kind) for kind in ("triton", "plain")
    )
    for step in steps:
        by_kernel.end(hold=hold, **step)
        by_torch.end(hold=hold, **step)
        assert by_kernel.shown() == by_torch.shown()


def test_rows_go_round_the_ring(device):
    by_kernel, by_torch = (
        UpdateCase(DynamicScale(), device, kind) for kind in ("triton", "plain")
    )
    for step in range(RING + 3):
        by_kernel.end(scale=float(step + 1))
        by_torch.end(scale=float(step + 1))
    assert by_kernel.shown() == by_torch.shown()
    assert by_kernel.state.ring[:, ROW.index("scale")].amax() == RING + 3


def test_every_tensor_is_written_in_place(device):
    case = UpdateCase(DynamicScale(growth_interval=1), device, "triton")
    before = {name: value.data_ptr() for name, value in case.tensors().items()}
    case.end(1.0)
    after = {name: value.data_ptr() for name, value in case.tensors().items()}
    assert after == before
    assert case.scaling.scale.item() == 2.0**15


@pytest.mark.parametrize("growth_factor", [2.0, 3.0, 2.0**100])
def test_growth_that_overflows_leaves_the_scale_as_it_is(device, growth_factor):
    policy = DynamicScale(
        init_scale=2.0**127,
        max_scale=HIGHEST_SCALE,
        growth_factor=growth_factor,
        growth_interval=1,
    )
    case = UpdateCase(policy, device, "triton")
    case.end()
    assert case.scaling.scale.item() == 2.0**127


def test_a_product_that_underflows_is_clipped_to_min_scale(device):
    policy = DynamicScale(
        init_scale=LOWEST_SCALE, min_scale=LOWEST_SCALE, backoff_factor=2.0**-100
    )
    case = UpdateCase(policy, device, "triton")
    case.end(1.0)
    assert case.scaling.scale.item() == LOWEST_SCALE


def test_a_count_beyond_the_interval_grows_at_once(device):
    case = UpdateCase(DynamicScale(init_scale=4.0, growth_interval=3), device, "triton")
    case.scaling.finite_steps.fill_(7)
    case.end()
    assert case.plain_scaling() == (8.0, 0, 0)


def _scaler_run(device, kind, guard):
    scaler = GradScaler(device.type, init_scale=64.0, growth_interval=2, guard=guard)
    param = parameter(3)
    param.data = param.data.to(device)
    optimizer = torch.optim.SGD([param], lr=1.0)
    seen = []
    for grad in (1.0, INF, 1.0, 1.0, NAN, 1.0, 1.0):
        optimizer.zero_grad()
        loss = planted(param, grad)
        if math.isnan(grad):
            loss = loss + NAN
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        # The end of the step alone: earlier stages have kernels of their own.
        scaler._kernels = kind
        scaler.update()
        scaler._kernels = "plain"
        seen.append(repr((scaler.last.record, scaler.last[optimizer].record)))
    return seen, scaler.state_dict()


@pytest.mark.parametrize("guard", ["report", "raise"])
def test_a_scaler_ends_its_steps_by_the_kernel_as_without_it(device, guard):
    assert _scaler_run(device, "triton", guard) == _scaler_run(device, "plain", guard)
