"""Noticing a backward pass that adds scaled gradients to unscaled ones."""

import warnings

import pytest
import torch

from gradscale import GradscaleWarning, OrderError
from gradscale.torch import GradScaler
from tests.torch.training import OPTIMIZERS, backward, parameter, planted

SGD = torch.optim.SGD


def _ready(make=SGD, **how):
    scaler, param = GradScaler("cpu", **how), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, 1.0)
    return scaler, optimizer, param


def _unscaled(scaler, optimizer, param):
    scaler.unscale_(optimizer)


def _clipped(scaler, optimizer, param):
    scaler.clip_grad_norm_(optimizer, 1.0)


def _unscaled_and_clipped(scaler, optimizer, param):
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)


CLOSED = [_unscaled, _clipped, _unscaled_and_clipped]
closed = pytest.mark.parametrize("close", CLOSED, ids=lambda f: f.__name__[1:])


@closed
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_late_backward_is_reported_with_code_and_remedy(close, make):
    scaler, optimizer, param = _ready(make)
    close(scaler, optimizer, param)
    with pytest.warns(GradscaleWarning, match=r"after the last backward") as said:
        backward(scaler, param, 1.0)
    assert [w.message.code for w in said] == ["GS104"]
    assert "param_groups[0]['params'][0]" in str(said[0].message)


@closed
def test_a_late_backward_is_an_error_where_that_was_asked_for(close):
    scaler, optimizer, param = _ready(guard="raise")
    close(scaler, optimizer, param)
    with pytest.raises(OrderError, match=r"params'\]\[0\].*GS104"):
        backward(scaler, param, 1.0)


def test_the_parameter_is_named_by_the_model():
    model = torch.nn.Linear(2, 1)
    scaler = GradScaler("cpu", model=model)
    optimizer = SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.warns(GradscaleWarning, match="clipped: weight, bias"):
        scaler.scale(model(torch.ones(2)).sum()).backward()


def test_a_loss_scaled_before_the_unscale_is_reported_too():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    first, second = (scaler.scale(planted(param, 1.0)) for _ in range(2))
    first.backward()
    scaler.unscale_(optimizer)
    with pytest.warns(GradscaleWarning, match="GS104"):
        second.backward()


def test_gradients_that_were_dropped_and_made_anew_are_unscaled_anew():
    scaler, optimizer, param = _ready()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    backward(scaler, param, 1.0)
    before = param.detach().clone()
    scaler.step(optimizer)
    assert (before - param).tolist() == [1.0] * param.numel()


@pytest.fixture
def _errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("_errors")
def test_accumulation_before_the_unscale_is_not_reported():
    scaler, optimizer, param = _ready()
    backward(scaler, param, 1.0)
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("_errors")
def test_the_next_iteration_is_not_reported():
    scaler, optimizer, param = _ready()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    backward(scaler, param, 1.0)


@pytest.mark.usefixtures("_errors")
def test_a_backward_after_reset_is_not_reported():
    scaler, optimizer, param = _ready()
    scaler.unscale_(optimizer)
    scaler.reset()
    backward(scaler, param, 1.0)


@pytest.mark.usefixtures("_errors")
def test_clipping_and_writing_by_hand_are_not_reported():
    scaler, optimizer, param = _ready()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([param], 0.5)
    param.grad.mul_(2.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.usefixtures("_errors")
def test_the_backward_of_another_optimizers_loss_is_not_reported():
    scaler, optimizer, param = _ready()
    scaler.unscale_(optimizer)
    backward(scaler, parameter(2), 1.0)
    assert param.grad.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("_errors")
def test_gradients_taken_without_accumulating_are_not_reported():
    scaler, optimizer, param = _ready()
    scaler.unscale_(optimizer)
    torch.autograd.grad(scaler.scale(planted(param, 1.0)), [param])


@pytest.mark.usefixtures("_errors")
def test_a_loss_without_a_graph_can_be_scaled():
    scaler, optimizer, _ = _ready()
    scaler.unscale_(optimizer)
    assert scaler.scale(torch.ones(())).item() == 65536.0


@pytest.mark.usefixtures("_errors")
def test_a_graph_can_be_run_backward_twice_before_the_unscale():
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    loss = scaler.scale((param * 2.0).sum())
    loss.backward(retain_graph=True)
    loss.backward()
    assert param.grad.tolist() == [16.0, 16.0]
