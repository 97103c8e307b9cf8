"""The protocol of optimizers that unscale and skip in their own kernels."""

import pytest
import torch

from gradscale.torch import GradScaler
from gradscale.torch.step.amp_protocol import amp_attributes, prepare_momentum
from tests.torch.training import (
    FUSED,
    INF,
    NAN,
    Custom,
    CustomFused,
    backward,
    iterate,
    parameter,
)

SGD = torch.optim.SGD
fused = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


@pytest.mark.parametrize(("grad", "found"), [(1.0, 0.0), (INF, 1.0), (NAN, 1.0)])
def test_the_optimizer_gets_the_scale_and_zero_or_one(grad, found):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = CustomFused([param])
    iterate(scaler, optimizer, param, grad)
    assert optimizer.seen == [(8.0, found)]


@pytest.mark.parametrize(("grad", "found"), [(1.0, 0.0), (INF, 1.0)])
def test_after_unscale_the_optimizer_gets_no_scale(grad, found):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = CustomFused([param])
    backward(scaler, param, grad)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.seen == [(None, found)]


def test_many_bad_gradients_are_still_exactly_one():
    scaler = GradScaler("cpu")
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    params = [parameter(3, dtype=dtype) for dtype in dtypes]
    optimizer = CustomFused(params)
    for param in params:
        backward(scaler, param, INF)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    ((_, found),) = optimizer.seen
    assert found == 1.0


def test_the_optimizer_gets_the_scale_of_the_backward_and_not_the_next():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    a, b = parameter(2), parameter(2)
    first, second = CustomFused([a]), CustomFused([b])
    backward(scaler, a, 1.0)
    backward(scaler, b, 1.0)
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    scaler.update()
    assert second.seen == [(8.0, 0.0)]
    assert scaler.last.scale == 8.0


@fused
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_skipped_step_leaves_parameters_and_state(make, unscale, bad):
    scaler, param = GradScaler("cpu"), parameter(2, value=1.0)
    optimizer = make([param], lr=0.5)
    iterate(scaler, optimizer, param, 1.0)
    kept = param.tolist()
    states = {
        key: value.clone()
        for key, value in optimizer.state[param].items()
        if value is not None
    }
    optimizer.zero_grad()
    backward(scaler, param, [1.0, bad])
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == kept
    for key, value in states.items():
        assert torch.equal(optimizer.state[param][key], value), key


@fused
def test_gradients_are_left_unscaled_by_a_step(make):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = make([param], lr=0.5)
    backward(scaler, param, 0.75)
    scaler.step(optimizer)
    assert param.grad.tolist() == [0.75, 0.75]


@fused
def test_gradients_are_not_written_before_the_step(make):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = make([param], lr=0.5)
    backward(scaler, param, 0.75)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append((param.grad.tolist(), param.grad._version))
    )
    version = param.grad._version
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert seen == [([6.0, 6.0], version)]


@pytest.mark.parametrize("unscale", [False, True])
def test_a_preset_scale_multiplies_and_is_used_up(unscale):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = CustomFused([param])
    backward(scaler, param, 1.0)
    if unscale:
        scaler.unscale_(optimizer)
    optimizer.grad_scale = torch.tensor(2.0)
    scaler.step(optimizer)
    assert optimizer.seen == [(2.0 if unscale else 16.0, 0.0)]
    assert param.tolist() == [-0.5, -0.5]
    assert not hasattr(optimizer, "grad_scale")


@fused
def test_a_preset_scale_does_what_it_does_in_torch(make):
    def run(kind):
        scaler, param = kind("cpu", init_scale=8.0), parameter(2)
        optimizer = make([param], lr=0.5)
        for preset in (2.0, None, 4.0):
            optimizer.zero_grad()
            backward(scaler, param, 1.0)
            if preset is not None:
                optimizer.grad_scale = torch.tensor(preset)
            scaler.step(optimizer)
            scaler.update()
        return param.tolist(), param.grad.tolist()

    assert run(GradScaler) == run(torch.amp.GradScaler)


def test_a_preset_scale_is_multiplied_by_the_clip():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = CustomFused([param])
    backward(scaler, param, [3.0, 4.0])
    optimizer.grad_scale = torch.tensor(2.0)
    scaler.clip_grad_norm_(optimizer, 2.5)
    scaler.step(optimizer)
    # 1e-6 is added to the norm, as in torch.
    assert optimizer.seen[0][0] == pytest.approx(32.0, rel=1e-6)


def _failing(*_):
    raise ZeroDivisionError


@fused
@pytest.mark.parametrize("unscale", [False, True])
def test_a_failing_step_can_be_repeated(make, unscale):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = make([param], lr=0.5)
    hook = optimizer.register_step_pre_hook(_failing)
    backward(scaler, param, 1.0)
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    hook.remove()
    scaler.step(optimizer)
    scaler.update()
    assert param.grad.tolist() == [1.0, 1.0]
    assert scaler.last.applied


def test_a_failing_step_gives_a_preset_scale_back():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = CustomFused([param])
    optimizer.register_step_pre_hook(_failing)
    optimizer.grad_scale = preset = torch.tensor(2.0)
    backward(scaler, param, 1.0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert optimizer.grad_scale is preset
    assert not hasattr(optimizer, "found_inf")


def test_attributes_are_lent_for_the_step_only():
    optimizer = Custom([parameter(2)])
    with amp_attributes(optimizer, torch.tensor(8.0), torch.tensor(0.0)):
        assert (optimizer.grad_scale, optimizer.found_inf) == (8.0, 0.0)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_hooks_of_a_fused_optimizer_fire_as_in_torch():
    def run(kind):
        scaler, param, fired = kind("cpu"), parameter(2), []
        optimizer = SGD([param], lr=1.0, fused=True)
        optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
        optimizer.register_step_post_hook(lambda *_: fired.append("after"))
        for grad in (1.0, INF):
            iterate(scaler, optimizer, param, grad)
        return fired

    assert run(GradScaler) == run(torch.amp.GradScaler) == ["before", "after"] * 2


def test_the_value_of_a_fused_step_is_returned():
    class Talking(CustomFused):
        def step(self, closure=None):
            super().step(closure)
            return "done"

    scaler, param = GradScaler("cpu"), parameter(2)
    backward(scaler, param, 1.0)
    assert scaler.step(Talking([param])) == "done"


def _with_gradients(**settings):
    params = [parameter(2), parameter(2)]
    params[0].grad = torch.ones(2)
    return SGD(params, lr=1.0, **settings), params


def test_momentum_buffers_are_zero_before_the_first_step():
    optimizer, params = _with_gradients(momentum=0.9, fused=True)
    assert not prepare_momentum(optimizer)
    assert optimizer.state[params[0]]["momentum_buffer"].tolist() == [0.0, 0.0]
    assert "momentum_buffer" not in optimizer.state[params[1]]


def test_momentum_buffers_that_are_there_are_left_alone():
    optimizer, params = _with_gradients(momentum=0.9, fused=True)
    buffer = optimizer.state[params[0]]["momentum_buffer"] = torch.ones(2)
    prepare_momentum(optimizer)
    assert optimizer.state[params[0]]["momentum_buffer"] is buffer


@pytest.mark.parametrize(
    "settings", [{"fused": True}, {"momentum": 0.9}, {"momentum": 0.9, "foreach": True}]
)
def test_buffers_are_made_for_fused_momentum_only(settings):
    optimizer, params = _with_gradients(**settings)
    assert not prepare_momentum(optimizer)
    assert not optimizer.state[params[0]]


def test_with_dampening_the_flag_must_be_read_until_there_are_buffers():
    optimizer, params = _with_gradients(momentum=0.9, dampening=0.5, fused=True)
    assert prepare_momentum(optimizer)
    assert not optimizer.state[params[0]]
    optimizer.state[params[0]]["momentum_buffer"] = torch.ones(2)
    assert not prepare_momentum(optimizer)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dampening": 0.5},
        {"nesterov": True},
        {"maximize": True},
        {"weight_decay": 0.25},
    ],
    ids=str,
)
@pytest.mark.parametrize("skips", [0, 1, 3])
def test_momentum_after_skips_is_momentum_without_them(settings, skips):
    def run(grads, **how):
        scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2, value=1.0)
        optimizer = SGD([param], lr=0.5, momentum=0.5, **settings, **how)
        for grad in grads:
            iterate(scaler, optimizer, param, grad)
        return param.tolist(), optimizer.state[param]["momentum_buffer"].tolist()

    # Halves only: exact in every order of operations.
    grads = [1.0, 0.5, -0.25]
    assert run([INF] * skips + grads, fused=True) == run(grads)
