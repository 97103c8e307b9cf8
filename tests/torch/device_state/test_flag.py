"""One flag on its way to the host."""

import pytest
import torch

from gradscale.torch import GradScaler
from gradscale.torch.device_state import flag as flags
from gradscale.torch.device_state.flag import Flag
from tests.torch.training import INF, backward, iterate, parameter

CPU = torch.device("cpu")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("skip", "value"),
    [(0.0, False), (1.0, True), (2.0, True), (-1.0, False), (float("nan"), True)],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_flag_above_zero_or_nan_skips(skip, value, shape):
    assert Flag.start(torch.full(shape, skip)).value() is value


def test_a_flag_stands_for_the_very_tensor_it_was_started_with():
    skip = torch.tensor(1.0)
    started = Flag.start(skip)
    assert started.stands_for({CPU: skip})
    assert not started.stands_for({CPU: skip.clone()})


def test_a_flag_does_not_stand_for_a_tensor_that_was_written_to():
    skip = torch.tensor(0.0)
    started = Flag.start(skip)
    skip.fill_(1.0)
    assert not started.stands_for({CPU: skip})


def test_a_flag_does_not_stand_for_several_devices_or_none():
    skip = torch.tensor(0.0)
    started = Flag.start(skip)
    assert not started.stands_for({CPU: skip, torch.device("meta"): skip})
    assert not started.stands_for({})


def test_a_flag_is_read_once_and_remembered():
    skip = torch.tensor(1.0)
    started = Flag.start(skip)
    assert started.value() is True
    skip.fill_(0.0)
    assert started.value() is True


@cuda
def test_a_flag_holds_what_was_there_when_it_was_started():
    skip = torch.ones((), device="cuda")
    started = Flag.start(skip)
    skip.fill_(0.0)
    assert started.value() is True


@cuda
def test_a_flag_does_not_wait_for_what_was_queued_after_it():
    started = Flag.start(torch.ones((), device="cuda"))
    # About half a second of work.
    torch.cuda._sleep(10**9)
    later = torch.cuda.Event()
    later.record()
    assert started.value() is True
    assert not later.query()
    torch.cuda.synchronize()


@cuda
def test_pinned_memory_is_used_again():
    skip = torch.ones((), device="cuda")
    Flag.start(skip).value()
    before = {pinned.data_ptr() for pinned, _ in flags._free[skip.device]}
    for _ in range(5):
        Flag.start(skip).value()
    assert {pinned.data_ptr() for pinned, _ in flags._free[skip.device]} == before


@cuda
def test_two_flags_under_way_do_not_share_memory():
    first = Flag.start(torch.ones((), device="cuda"))
    second = Flag.start(torch.zeros((), device="cuda"))
    assert (first.value(), second.value()) == (True, False)


def _unscaled(**how):
    scaler, param = GradScaler("cpu", init_scale=8.0, **how), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.unscale_(optimizer)
    return scaler, optimizer, param


@pytest.fixture
def read(monkeypatch):
    """Return the values of all flags that are read."""
    values, value = [], Flag.value

    def noted(flag):
        values.append(value(flag))
        return values[-1]

    monkeypatch.setattr(Flag, "value", noted)
    return values


@pytest.mark.parametrize(("grad", "skip"), [(1.0, False), (INF, True)])
def test_a_step_reads_the_flag_that_was_sent_ahead(read, grad, skip):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, grad)
    assert read == [skip]
    assert scaler.last.applied is not skip


def test_a_flag_that_was_written_by_hand_is_read_anew(read):
    scaler, optimizer, param = _unscaled()
    scaler._found_inf_per_device(optimizer)[CPU].fill_(1.0)
    scaler.step(optimizer)
    assert read == []
    assert param.tolist() == [0.0, 0.0]


def test_a_clip_after_unscale_may_still_skip(read):
    scaler, optimizer, param = _unscaled()
    param.grad.fill_(INF)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert read == []
    assert param.tolist() == [0.0, 0.0]


def test_a_second_look_may_still_skip(read):
    scaler, optimizer, param = _unscaled(recheck=True)
    param.grad.fill_(INF)
    scaler.step(optimizer)
    assert read == []
    assert param.tolist() == [0.0, 0.0]


def test_a_fused_optimizer_is_told_on_the_device_and_no_flag_is_read(read):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    iterate(scaler, optimizer, param, 1.0)
    assert read == []
    assert scaler.last.applied
