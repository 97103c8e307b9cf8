"""Names and availability of devices, and operations that they lack."""

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradscale import ConfigError, GradscaleWarning
from gradscale.torch import GradScaler
from gradscale.torch.devices import device_type, is_available
from gradscale.torch.grads.read_plain import read_on_device
from tests.torch.training import INF, backward, parameter


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", "cpu"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda"),
        ("mps", "mps"),
        ("xpu:0", "xpu"),
        (torch.device("cuda", 1), "cuda"),
        (torch.device("cpu"), "cpu"),
    ],
    ids=str,
)
def test_a_device_is_taken_by_its_type(device, kind):
    assert device_type(device) == kind


@pytest.mark.parametrize("name", ["nonsense", "gpu", "", "cuda:x"])
def test_a_device_that_torch_does_not_know_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"device='{name}' .*'mps' or 'xpu'.*GS107"):
        GradScaler(name)


@pytest.mark.parametrize("device", [1024.0, 2, None, [], True], ids=repr)
def test_a_device_that_is_no_text_is_refused_by_type(device):
    with pytest.raises(ConfigError, match=rf"a {type(device).__name__}\. .*GS107"):
        GradScaler(device)


class _Module:
    def __init__(self, available):
        self.is_available = lambda: available


@pytest.fixture(params=["xpu", "mps"])
def missing(request, monkeypatch):
    """Return the type of a device that is not available, on any machine."""
    monkeypatch.setattr(torch, "get_device_module", lambda kind: _Module(False))
    return request.param


def test_a_missing_device_is_a_coded_warning_at_the_callers_line(missing):
    with pytest.warns(GradscaleWarning, match=f"'{missing}', which is not") as caught:
        GradScaler(missing)
    assert [w.message.code for w in caught] == ["GS107"]
    assert caught[0].filename == __file__
    assert "device='cpu'" in str(caught[0].message)
    assert "enabled=False" in str(caught[0].message)


def test_a_missing_device_turns_scaling_off(missing):
    with pytest.warns(GradscaleWarning):
        scaler = GradScaler(missing)
    assert not scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 1.0


def test_a_missing_device_gives_no_warning_where_scaling_is_off(missing):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler(missing, enabled=False)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_a_device_that_is_available_is_used(kind, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda kind: _Module(True))
    assert GradScaler(kind).is_enabled()


def test_a_device_without_a_module_is_not_available():
    assert not is_available("meta")


@pytest.mark.parametrize(("absent", "available"), [(True, False), (False, True)])
def test_cuda_is_available_unless_torch_denies_it(absent, available, monkeypatch):
    monkeypatch.setattr(
        torch.cuda.amp.common, "amp_definitely_not_available", lambda: absent
    )
    assert is_available("cuda") is available


class NoF64(TorchDispatchMode):
    """Fails as MPS would: an operator that returns an f64 is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64:
                raise TypeError(f"{func} made an f64")
        return returned


def test_the_mode_fails_at_an_f64():
    with NoF64(), pytest.raises(TypeError, match="made an f64"):
        torch.ones(()).double()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("grad", [1.0, INF])
def test_scale_unscale_step_and_update_make_no_f64(make, grad):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0, foreach=False)
    param.grad = torch.zeros(2)
    with NoF64():
        scaler.scale(torch.ones(()))
        param.grad.fill_(grad)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last.applied is (grad == 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm_type", [None, 2.0, INF])
def test_reading_on_a_device_without_f64_makes_none(dtype, norm_type):
    # "meta" stands for MPS: neither cuda nor cpu.
    grads = [torch.ones(3, dtype=dtype, device="meta") for _ in range(2)]
    with NoF64():
        peak, each, norm = read_on_device(grads, norm_type)
    assert (peak.dtype, each.dtype) == (torch.float32, torch.float32)
    assert norm is None or norm.dtype is torch.float32


def test_the_scale_is_on_the_device_of_the_first_loss():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones((), device="meta"))
    assert scaler._scale.device.type == "meta"


def test_a_torch_device_serves_for_a_whole_step():
    scaler, param = GradScaler(torch.device("cpu")), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    scaler.update(torch.tensor(8.0))
    assert scaler.get_scale() == 8.0
