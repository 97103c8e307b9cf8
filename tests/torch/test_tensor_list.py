"""Snapshots of many tensors: what counts as the same."""

import pytest
import torch

from gradscale.torch.grads.collect import collect
from gradscale.torch.tensor_list import are_grads, same, same_state
from tests.torch.training import parameter


def _with_grads(count=3):
    params = [parameter(4) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(4)
    return params


def test_gradients_that_nothing_touched_are_those_of_the_snapshot():
    params = [*_with_grads(), parameter(2)]
    snapshot = collect(params, allow_fp16=False)
    assert len(snapshot.tensors) == 3
    assert are_grads(params, snapshot, snapshot.versions)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("change", ["write", "replace", "drop", "move"])
def test_a_gradient_that_was_touched_is_not_that_of_the_snapshot(place, change):
    params = _with_grads()
    snapshot = collect(params, allow_fp16=False)
    if change == "write":
        params[place].grad.mul_(2.0)
    elif change == "replace":
        params[place].grad = torch.ones(4)
    elif change == "drop":
        params[place].grad = None
    else:
        params[place].grad.data = torch.ones(4)
    assert not are_grads(params, snapshot, snapshot.versions)


def test_a_part_of_a_snapshot_keeps_its_numbers():
    params = _with_grads()
    snapshot = collect(params, allow_fp16=False)
    part = snapshot.only([2, 0])
    assert same(part.params, [params[2], params[0]])
    assert part.addresses.tolist() == [snapshot.addresses[2], snapshot.addresses[0]]
    assert (part.numels.tolist(), part.present) == ([4, 4], 2)


@pytest.mark.parametrize("change", ["value", "entry", "owner", "order"])
def test_another_state_of_an_optimizer_is_not_the_same(change):
    owners, values = [object(), object()], [object(), object()]
    state = {owners[0]: {"a": values[0]}, owners[1]: {"a": values[1]}}
    assert same_state(state, owners, values)
    if change == "value":
        state[owners[1]]["a"] = object()
    elif change == "entry":
        state[owners[1]]["b"] = object()
    elif change == "owner":
        state[object()] = {}
    else:
        state[owners[0]] = state.pop(owners[0])
    assert not same_state(state, owners, values)
