"""Buffers and gradients of a step that is not taken."""

import pytest
import torch
from torch import nn

from gradscale import ConfigError
from gradscale.torch import GradScaler
from tests.torch.training import INF, OPTIMIZERS, iterate, parameter

optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def step(scaler, model, optimizer, batch):
    optimizer.zero_grad()
    scaler.scale(model(batch).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@optimizers
def test_a_skipped_step_sets_the_buffers_back(make):
    model = norm_net()
    optimizer = make(list(model.parameters()), lr=0.01)
    scaler = GradScaler("cpu", model=model, guard_buffers=True)
    good = torch.randn(8, 3)
    step(scaler, model, optimizer, good)
    before = buffers(model)
    assert before["1.num_batches_tracked"] == 1
    bad = good.clone()
    bad[2, 1] = INF
    step(scaler, model, optimizer, bad)
    assert not scaler.last.applied
    after = buffers(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    step(scaler, model, optimizer, good)
    assert model[1].num_batches_tracked == 2
    assert torch.isfinite(model[1].running_mean).all()


def test_without_the_guard_a_skipped_step_contaminates_them():
    model = norm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", model=model)
    step(scaler, model, optimizer, torch.full((8, 3), INF))
    assert not torch.isfinite(model[1].running_mean).all()


def test_the_guard_needs_a_model():
    with pytest.raises(ConfigError, match=r"guard_buffers=True.*model=model"):
        GradScaler("cpu", guard_buffers=True)


@optimizers
@pytest.mark.parametrize("on_skip", ["keep", "clear"])
def test_gradients_of_a_skipped_step_are_kept_or_cleared(make, on_skip):
    scaler, param = GradScaler("cpu", init_scale=8.0, on_skip=on_skip), parameter(2)
    optimizer = make([param], lr=1.0)
    iterate(scaler, optimizer, param, [INF, 1.0])
    if on_skip == "keep":
        assert not torch.isfinite(param.grad).all()
    else:
        assert param.grad is None or param.grad.tolist() == [0.0, 0.0]


@optimizers
def test_cleared_gradients_do_not_reach_the_next_window(make):
    scaler, param = GradScaler("cpu", init_scale=8.0, on_skip="clear"), parameter(2)
    twin = parameter(2)
    optimizer, plain = make([param], lr=1.0), make([twin], lr=1.0)
    iterate(scaler, optimizer, param, [INF, 1.0])
    # No zero_grad.
    from tests.torch.training import backward

    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied
    iterate(GradScaler("cpu", init_scale=4.0), plain, twin, 1.0)
    assert torch.equal(param, twin)


@optimizers
def test_gradients_of_a_step_that_was_taken_are_not_cleared(make):
    scaler, param = GradScaler("cpu", init_scale=8.0, on_skip="clear"), parameter(2)
    iterate(scaler, make([param], lr=1.0), param, 1.0)
    assert param.grad is not None
    assert (param.grad != 0).all()


def test_a_word_that_is_no_choice_is_refused():
    with pytest.raises(ConfigError, match="on_skip='drop' is not one of"):
        GradScaler("cpu", on_skip="drop")
