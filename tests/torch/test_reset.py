"""`reset()`: an iteration that the user abandons."""

import pickle

import pytest
import torch

from gradscale import Verdict
from gradscale.torch import GradScaler
from tests.torch.training import (
    INF,
    NAN,
    OPTIMIZERS,
    backward,
    iterate,
    parameter,
    planted,
)

SGD = torch.optim.SGD
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def _unscaled(scaler, optimizer):
    scaler.unscale_(optimizer)


def _clipped(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 0.5)


def _stepped(scaler, optimizer):
    scaler.step(optimizer)


def _only_scaled(scaler, optimizer):
    pass


STAGES = [_only_scaled, _unscaled, _clipped, _stepped]
stages = pytest.mark.parametrize("stage", STAGES, ids=lambda f: f.__name__[1:])
whom = pytest.mark.parametrize("one", [False, True], ids=["all", "one"])


@stages
@whom
@optimizers
def test_the_next_iteration_is_as_if_the_abandoned_one_had_not_been(stage, one, make):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, INF)
    stage(scaler, optimizer)
    scaler.reset(optimizer if one else None)
    iterate(scaler, optimizer, param, 0.75)
    assert scaler.last.applied
    assert scaler.last.grad_norm is None
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 1)
    assert param.grad.tolist() == [0.75, 0.75]


@stages
def test_the_scale_does_not_move(stage):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, INF)
    stage(scaler, optimizer)
    before = scaler.state_dict()
    scaler.reset()
    assert scaler.state_dict() == before


def test_the_gradients_are_left_as_they_are():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    backward(scaler, param, 1.0)
    scaler.unscale_(SGD([param], lr=1.0))
    scaler.reset()
    assert param.grad.tolist() == [1.0, 1.0]


def test_a_bad_loss_is_forgotten():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    scaler.scale(planted(param, NAN) + NAN)
    scaler.reset()
    iterate(scaler, optimizer, param, INF)
    assert scaler.last.verdict is Verdict.CALIBRATING


def test_one_optimizer_can_be_reset_and_the_other_goes_on():
    scaler, a, b = GradScaler("cpu", init_scale=8.0), parameter(2), parameter(2)
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    backward(scaler, a, INF)
    backward(scaler, b, 1.0)
    scaler.unscale_(first)
    scaler.unscale_(second)
    scaler.reset(first)
    scaler.step(second)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert scaler.last.applied
    assert b.tolist() == [-1.0, -1.0]


def test_a_reset_leaves_the_other_optimizers_stage():
    scaler, a, b = GradScaler("cpu"), parameter(2), parameter(2)
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    backward(scaler, a, 1.0)
    backward(scaler, b, 1.0)
    scaler.unscale_(first)
    scaler.unscale_(second)
    scaler.reset(first)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(second)


def test_after_a_reset_there_is_nothing_to_update():
    scaler, param = GradScaler("cpu"), parameter(2)
    backward(scaler, param, 1.0)
    scaler.unscale_(SGD([param], lr=1.0))
    scaler.reset()
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to up"):
        scaler.update()


def test_after_a_reset_the_scaler_can_be_pickled():
    scaler, param = GradScaler("cpu"), parameter(2)
    backward(scaler, param, 1.0)
    scaler.unscale_(SGD([param], lr=1.0))
    scaler.reset()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


def test_the_last_outcome_is_kept():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, 1.0)
    backward(scaler, param, INF)
    scaler.unscale_(optimizer)
    scaler.reset()
    assert (scaler.last.step, scaler.last.applied) == (1, True)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_reset_before_the_first_loss_does_nothing(enabled):
    scaler = GradScaler("cpu", enabled=enabled)
    scaler.reset()
    scaler.reset(SGD([parameter(2)], lr=1.0))
    assert scaler.last is None


def test_a_step_that_was_cut_short_is_not_remembered_after_reset():
    scaler, a, b = GradScaler("cpu", init_scale=4.0), parameter(2), parameter(2)
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    backward(scaler, a, 1.0)
    backward(scaler, b, 8.0)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    scaler.reset()
    scaler.unscale_(second)
    assert b.grad.tolist() == [2.0, 2.0]


def test_what_the_module_hooks_have_observed_is_forgotten():
    layer = torch.nn.Linear(1, 1, bias=False)
    scaler = GradScaler("cpu", model=layer)
    hooks = scaler._monitor.module_hooks
    assert hooks.enable(layer)
    scaler.scale(layer(torch.full((1, 1), INF)).sum()).backward()
    scaler.reset()
    assert not hooks.locate(scale=1.0).found
    hooks.disable()
