"""Unscaling and the skip, decided on the device, under every scaler and none."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradscale.torch
from gradscale.torch.optim import SGD, AdamW
from tests.torch.optim.streams import (
    KINDS,
    everything,
    give,
    parameters,
    same,
    step_with,
    stream,
    train,
)
from tests.torch.training import backward, parameter

kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)
halves = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
scalers = pytest.mark.parametrize(
    "scaler_kind",
    [gradscale.torch.GradScaler, torch.amp.GradScaler],
    ids=["ours", "torch"],
)


@kinds
@halves
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("write_back", [False, True])
def test_a_skip_leaves_every_bit(kind, how, dtype, bad, write_back):
    params = parameters(dtype)
    optimizer = kind(params, **how, write_back=write_back)
    train(optimizer, steps=3)
    give(params, next(stream(1)))
    params[1].grad[1, 2] = bad
    before, grads = everything(optimizer), [p.grad.clone() for p in params]
    step_with(optimizer, grad_scale=8.0, found_inf=1.0)
    assert same(everything(optimizer), before)
    assert same([p.grad for p in params], grads)


@kinds
def test_a_first_step_that_is_skipped_leaves_a_state_like_new(kind, how):
    def run(first_is_skipped):
        params = parameters()
        optimizer = kind(params, **how)
        if first_is_skipped:
            give(params, [torch.full_like(p, math.nan) for p in params])
            step_with(optimizer, found_inf=1.0)
        train(optimizer)
        return everything(optimizer)

    assert same(run(True), run(False))


@kinds
@halves
def test_a_flag_of_zero_is_no_flag(kind, how, dtype):
    def run(step):
        params = parameters(dtype)
        optimizer = kind(params, **how)
        for grads in stream(3):
            give(params, grads)
            step(optimizer)
        return everything(optimizer)

    assert same(run(step_with), run(lambda optimizer: optimizer.step()))


@kinds
@given(exponent=st.integers(-8, 12), seed=st.integers(0, 2**16))
def test_a_power_of_two_as_the_scale_leaves_no_trace(kind, how, exponent, seed):
    scale = 2.0**exponent
    grads = [torch.randn(3, generator=torch.Generator().manual_seed(seed))]

    def run(factor, grad_scale):
        params = parameters(shapes=[(3,)])
        optimizer = kind(params, **how)
        give(params, [grad * factor for grad in grads])
        step_with(optimizer, grad_scale=grad_scale)
        return everything(optimizer)

    assert same(run(scale, scale), run(1.0, None))


@kinds
def test_f16_gradients_are_unscaled_in_f32(kind, how):
    # 2**-30 is no f16; scaled by 2**20 it is one.
    def run(dtype, factor, grad_scale):
        param = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        optimizer = kind([param], **how)
        param.grad = torch.full((2,), 2.0**-30 * factor, dtype=dtype)
        step_with(optimizer, grad_scale=grad_scale)
        state = optimizer.state[param]
        return state["master"] if dtype is torch.float16 else param.detach()

    ours = run(torch.float16, 2.0**20, 2.0**20)
    assert torch.equal(ours, run(torch.float32, 1.0, None))
    assert not torch.equal(ours, torch.zeros(2))


@kinds
def test_gradients_are_left_as_they_came(kind, how):
    params = parameters()
    optimizer = kind(params, **how)
    give(params, next(stream(1)))
    before = [(p.grad, p.grad.clone(), p.grad._version) for p in params]
    step_with(optimizer, grad_scale=8.0)
    for param, (grad, values, version) in zip(params, before, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, values)
        assert grad._version == version


@kinds
def test_gradients_are_unscaled_in_place_on_request(kind, how):
    params = parameters()
    optimizer = kind(params, **how, write_back=True)
    grads = next(stream(1))
    give(params, [grad * 8.0 for grad in grads])
    step_with(optimizer, grad_scale=8.0)
    assert same([p.grad for p in params], grads)


@scalers
@kinds
@pytest.mark.parametrize("write_back", [False, True])
def test_a_scaler_steps_and_skips(scaler_kind, kind, how, write_back):
    def run(scaler, grads):
        param = parameter(2, value=1.0)
        optimizer = kind([param], **how, write_back=write_back)
        for grad in grads:
            optimizer.zero_grad()
            if scaler is None:
                param.grad = torch.full((2,), grad)
                optimizer.step()
                continue
            backward(scaler, param, grad)
            scaler.step(optimizer)
            scaler.update()
        return everything(optimizer)

    grads = [1.0, 0.5, -0.25]
    with_skips = [math.inf, 1.0, math.nan, 0.5, -0.25, math.inf]
    scaler = scaler_kind("cpu", init_scale=8.0)
    assert same(run(scaler, with_skips), run(None, grads))
    assert scaler.get_scale() == 1.0


@scalers
def test_gradients_that_were_unscaled_before_are_taken_as_they_are(scaler_kind):
    param = parameter(2)
    scaler, optimizer = scaler_kind("cpu", init_scale=8.0), SGD([param], lr=0.5)
    backward(scaler, param, 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-0.5, -0.5]


def test_a_clip_is_folded_into_the_step():
    scaler, param = gradscale.torch.GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, [3.0, 4.0])
    scaler.clip_grad_norm_(optimizer, 2.5)
    scaler.step(optimizer)
    scaler.update()
    # 1e-6 is added to the norm, as in torch.
    assert param.tolist() == pytest.approx([-1.5, -2.0], rel=1e-6)


@scalers
def test_f16_parameters_train_under_a_scaler(scaler_kind):
    param = parameter(2, value=1.0, dtype=torch.float16)
    scaler, optimizer = scaler_kind("cpu", init_scale=8.0), AdamW([param], lr=0.5)
    for grad in (1.0, math.inf):
        optimizer.zero_grad()
        backward(scaler, param, grad)
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == pytest.approx([0.495, 0.495], rel=2.0**-11)
    assert optimizer.state[param]["step"] == 1.0


def test_a_flag_of_one_element_and_one_dimension_is_a_flag():
    param = parameter(value=1.0)
    optimizer = AdamW([param], lr=0.5)
    param.grad = torch.ones(())
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([2.0]), torch.zeros(1)
    optimizer.step()
    stepped = param.item()
    assert stepped == pytest.approx(0.495)
    optimizer.found_inf = torch.ones(1)
    optimizer.step()
    assert param.item() == stepped


def test_flags_of_two_devices_that_torch_has_added_are_a_skip():
    param = parameter(2, value=1.0)
    optimizer = SGD([param], lr=0.5)
    param.grad = torch.ones(2)
    step_with(optimizer, found_inf=2.0)
    assert param.tolist() == [1.0, 1.0]
