"""The momentum of SGD: its first step, and what a checkpoint shows of it."""

import copy

import pytest
import torch

from gradscale.torch.optim import SGD
from tests.torch.optim.streams import (
    give,
    parameters,
    same,
    step_with,
    stream,
    train,
)


def test_a_momentum_before_the_first_step_is_none():
    params = parameters()
    optimizer = SGD(params, momentum=0.5, dampening=0.5)
    give(params, next(stream(1)))
    step_with(optimizer, found_inf=1.0)
    assert optimizer.state_dict()["state"] == {
        place: {"momentum_buffer": None} for place in range(len(params))
    }


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_momentum_of_sgd_is_saved_alone(dampening):
    optimizer = SGD(parameters(), momentum=0.5, dampening=dampening)
    train(optimizer, steps=2)
    saved = optimizer.state_dict()["state"]
    assert {tuple(state) for state in saved.values()} == {("momentum_buffer",)}
    assert same(
        [state["momentum_buffer"] for state in saved.values()],
        [state["momentum_buffer"] for state in optimizer.state.values()],
    )


@pytest.mark.parametrize("state", [{"momentum_buffer": None}, {}, None], ids=str)
def test_a_momentum_that_is_none_or_missing_loads(state):
    params = parameters()
    optimizer = SGD(params, lr=0.5, momentum=0.5, dampening=0.5)
    saved = optimizer.state_dict()
    if state is not None:
        saved["state"] = {place: dict(state) for place in range(len(params))}
    optimizer.load_state_dict(saved)
    grads = next(stream(1))
    give(params, grads)
    optimizer.step()
    # The first step is not dampened.
    assert same([optimizer.state[p]["momentum_buffer"] for p in params], grads)


def test_a_loaded_momentum_is_dampened_on():
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([param], lr=1.0, momentum=0.5, dampening=0.5)
    saved = optimizer.state_dict()
    saved["state"] = {0: {"momentum_buffer": torch.ones(1)}}
    optimizer.load_state_dict(saved)
    param.grad = torch.ones(1)
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].tolist() == [1.0]


def test_a_copied_optimizer_knows_that_its_first_step_was_skipped():
    params = parameters()
    optimizer = SGD(params, momentum=0.5, dampening=0.5)
    grads = next(stream(1))
    give(params, grads)
    step_with(optimizer, found_inf=1.0)
    twin = copy.deepcopy(optimizer)
    copied = twin.param_groups[0]["params"]
    give(copied, grads)
    twin.step()
    assert same([twin.state[p]["momentum_buffer"] for p in copied], grads)
