"""Private names of torch's class that its tests and public code use."""

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradscale.torch import GradScaler
from tests.torch.training import (
    INF,
    NAN,
    Custom,
    backward,
    iterate,
    parameter,
    scaled_once,
)

TORCH = torch.amp.GradScaler
SGD = torch.optim.SGD


def test_scale_and_tracker_are_none_before_the_first_loss():
    scaler = GradScaler("cpu", init_scale=8.0)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler._get_scale_async() is None
    assert (scaler._init_scale, scaler._init_growth_tracker) == (8.0, 0)


def test_scale_and_tracker_are_tensors_after_it():
    scaler, _, _ = scaled_once(GradScaler, init_scale=8.0)
    assert scaler._get_scale_async() is scaler._scale
    assert (scaler._scale.dtype, scaler._scale.shape) == (torch.float32, ())
    assert scaler._growth_tracker.dtype is torch.int32
    assert (scaler._scale.item(), scaler._growth_tracker.item()) == (8.0, 0)


def test_scale_stays_the_same_tensor():
    scaler, param = GradScaler("cpu", growth_interval=1), parameter(2)
    optimizer = SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, 1.0)
    scale, tracker = scaler._scale, scaler._growth_tracker
    for grad in (INF, 1.0):
        iterate(scaler, optimizer, param, grad)
    scaler.update(8.0)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker


def test_the_initial_tracker_can_be_set():
    scaler, param = GradScaler("cpu", init_scale=4.0, growth_interval=9), parameter(2)
    scaler._init_growth_tracker = 8
    iterate(scaler, SGD([param], lr=1.0), param, 1.0)
    assert scaler.get_scale() == 8.0


def test_a_tracker_written_beyond_the_interval_grows_at_once():
    scaler, param = GradScaler("cpu", init_scale=4.0, growth_interval=3), parameter(2)
    scaler.scale(torch.zeros(()))
    scaler._growth_tracker.fill_(8)
    iterate(scaler, SGD([param], lr=1.0), param, 1.0)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)


def test_a_scale_written_into_the_tensor_is_used():
    scaler, param = GradScaler("cpu"), parameter(2)
    scaler.scale(torch.zeros(()))
    scaler._scale.fill_(8.0)
    backward(scaler, param, 1.0)
    assert param.grad.tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("_growth_factor", 4.0), ("_backoff_factor", 0.25), ("_growth_interval", 7)],
)
def test_a_setting_can_be_read_and_written_under_its_private_name(name, value):
    scaler = GradScaler("cpu")
    assert getattr(scaler, name) == getattr(TORCH("cpu"), name)
    setattr(scaler, name, value)
    assert scaler.state_dict()[name[1:]] == value


def test_the_stages_are_torchs_own():
    scaler, optimizer, _ = scaled_once(GradScaler)
    stages = [scaler._per_optimizer_states[id(optimizer)]["stage"]]
    scaler.unscale_(optimizer)
    stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"])
    scaler.step(optimizer)
    stages.append(scaler._per_optimizer_states[id(optimizer)]["stage"])
    assert stages == [OptState.READY, OptState.UNSCALED, OptState.STEPPED]


def test_a_fresh_state_equals_torchs():
    fresh = GradScaler("cpu")._per_optimizer_states["anything"]
    assert fresh == _refresh_per_optimizer_state()


@pytest.mark.parametrize(("grad", "flag"), [(1.0, 0.0), (INF, 1.0), (NAN, 1.0)])
def test_found_inf_per_device_has_one_flag_a_device(grad, flag):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, grad)
    scaler.unscale_(optimizer)
    found = scaler._found_inf_per_device(optimizer)
    assert {device.type: value.item() for device, value in found.items()} == {
        "cpu": flag
    }


def test_found_inf_per_device_is_empty_after_update_as_in_torch():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, INF)
    assert scaler._found_inf_per_device(optimizer) == {}


@pytest.mark.parametrize(("grad", "flag"), [(1.0, 0.0), (INF, 1.0)])
def test_check_inf_per_device_reads_and_writes_nothing(grad, flag):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    backward(scaler, param, grad)
    found = scaler._check_inf_per_device(SGD([param], lr=1.0))
    assert [value.item() for value in found.values()] == [flag]
    assert param.grad.tolist() == [8.0 * grad] * 2


def test_a_check_of_ones_own_leaves_the_unscaling_to_the_optimizer():
    class Own(GradScaler):
        def _check_inf_per_device(self, optimizer):
            found = {torch.device("cpu"): torch.zeros(())}
            self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
            return found

    scaler, param = Own("cpu", init_scale=8.0), parameter(2)
    before = param.tolist()
    iterate(scaler, SGD([param], lr=1.0, fused=True), param, 1.0)
    assert param.tolist() == [value - 1.0 for value in before]


@pytest.mark.parametrize("place", [0, 1, 6])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_unscale_grads_multiplies_and_returns_flags(place, bad):
    scaler, param = GradScaler("cpu"), parameter(7)
    param.grad = torch.full((7,), 4.0)
    param.grad[place] = bad
    found = scaler._unscale_grads_(
        SGD([param], lr=1.0), torch.full((1,), 0.25), torch.full((1,), 0.0), False
    )
    assert [(d.type, f.item()) for d, f in found.items()] == [("cpu", 1.0)]
    rest = [g for i, g in enumerate(param.grad.tolist()) if i != place]
    assert rest == [1.0] * 6


@pytest.mark.parametrize(("flag", "moved"), [(0.0, -1.0), (1.0, 0.0)])
def test_maybe_opt_step_asks_the_flags(flag, moved):
    scaler, param = GradScaler("cpu"), parameter(2)
    scaler.scale(torch.zeros(()))
    param.grad = torch.ones(2)
    state = {"found_inf_per_device": {torch.device("cpu"): torch.tensor(flag)}}
    scaler._maybe_opt_step(Custom([param]), state)
    assert param.tolist() == [moved, moved]
