"""Checkpoints and copies: in and out, and on as if never stopped."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch

from gradscale import StaticScale
from gradscale.torch import GradScaler
from tests.torch.training import (
    INF,
    NAN,
    iterate,
    parameter,
)

TORCH = torch.amp.GradScaler
SGD = torch.optim.SGD
FIVE = tuple(TORCH("cpu").state_dict())


named = partial(pytest.mark.parametrize, ids=lambda case: case.__name__)
GRADS = (1.0, INF, 1.0, 1.0, 1.0, NAN, 1.0, 1.0)


# An optimizer's counts are deleted with it.
_held = []


def _trained(kind, grads=GRADS, **how):
    scaler, param = kind("cpu", growth_interval=3, **how), parameter(2)
    optimizer = SGD([param], lr=1.0)
    for grad in grads:
        iterate(scaler, optimizer, param, grad)
    _held.append(optimizer)
    return scaler


def _five(state):
    return {key: state[key] for key in FIVE}


@pytest.mark.parametrize("count", range(len(GRADS) + 1))
def test_the_five_keys_hold_what_torchs_hold(count):
    ours, theirs = (_trained(kind, GRADS[:count]) for kind in (GradScaler, TORCH))
    assert _five(ours.state_dict()) == theirs.state_dict()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("source", "target"), [(GradScaler, TORCH), (TORCH, GradScaler)], ids=["out", "in"]
)
def test_a_state_loads_both_ways(source, target, lazy):
    state = _trained(source, init_scale=64.0, growth_factor=4.0).state_dict()
    loaded = target("cpu") if lazy else _trained(target)
    loaded.load_state_dict(state)
    assert _five(loaded.state_dict()) == _five(state)


@pytest.mark.parametrize("count", range(len(GRADS) + 1))
def test_a_run_resumed_from_torchs_state_goes_on_as_torch_would(count):
    reference = _trained(TORCH)
    resumed = GradScaler("cpu")
    resumed.load_state_dict(_trained(TORCH, GRADS[:count]).state_dict())
    param = parameter(2)
    for grad in GRADS[count:]:
        iterate(resumed, SGD([param], lr=1.0), param, grad)
    assert _five(resumed.state_dict()) == reference.state_dict()


def _by_pickle(scaler):
    return pickle.loads(pickle.dumps(scaler))


def _by_state(scaler):
    fresh = GradScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    return fresh


def _by_weights_only_file(scaler):
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    fresh = GradScaler("cpu")
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


WAYS = [_by_pickle, copy.deepcopy, copy.copy, _by_state, _by_weights_only_file]


@named("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_a_copy_has_the_same_state(way, count):
    scaler = _trained(GradScaler, GRADS[:count], init_scale=64.0)
    assert way(scaler).state_dict() == scaler.state_dict()


@named("way", WAYS)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_copy_goes_on_as_the_original(way, count):
    whole = _trained(GradScaler)
    copied = way(_trained(GradScaler, GRADS[:count]))
    param = parameter(2)
    optimizer = SGD([param], lr=1.0)
    for grad in GRADS[count:]:
        iterate(copied, optimizer, param, grad)
    assert copied.state_dict() == whole.state_dict()
    assert copied.postfix() == whole.postfix()
    assert copied.last.record == whole.last.record


@named("way", WAYS)
def test_a_copy_shares_no_tensor(way):
    scaler = _trained(GradScaler)
    before = scaler.get_scale()
    other = way(scaler)
    other.scale(torch.zeros(()))
    other.update(2.0)
    assert (scaler.get_scale(), other.get_scale()) == (before, 2.0)


def test_settings_survive_pickling():
    policy = StaticScale(scale=8.0)
    scaler = GradScaler("cpu", policy=policy, guard="raise", recheck=True)
    copied = _by_pickle(scaler)
    assert copied.policy == policy
    assert (copied._guard, copied._recheck) == ("raise", True)


def test_a_state_is_plain_data():
    kinds = set()

    def visit(value):
        kinds.add(type(value))
        for inner in value.values() if isinstance(value, dict) else []:
            visit(inner)
        for inner in value if isinstance(value, list) else []:
            visit(inner)

    visit(_trained(GradScaler).state_dict())
    assert kinds <= {dict, list, str, int, float, bool}
