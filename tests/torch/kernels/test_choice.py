"""When kernels are taken, and what happens where one cannot be built or started."""

import math
import warnings

import pytest
import torch

from gradscale.errors import ConfigError, GradscaleWarning
from gradscale.torch import GradScaler, kernels, optim
from gradscale.torch.device_state import update as settling
from gradscale.torch.kernels import adam, momentum, readers
from gradscale.torch.kernels import decide as deciding
from gradscale.torch.kernels import optimizer_pass as updating
from gradscale.torch.kernels import read as reading
from gradscale.torch.kernels import step_counter as counting
from gradscale.torch.kernels import update as kernel_settling
from tests.torch.training import backward

CPU, CUDA, META = (torch.device(kind) for kind in ("cpu", "cuda", "meta"))


@pytest.fixture(autouse=True)
def _working(monkeypatch):
    """Let each test begin, and leave, as if no kernel had failed."""
    monkeypatch.setattr(kernels, "_broken", None)


def test_plain_never_takes_kernels():
    assert not kernels.usable("plain", CPU)
    assert not kernels.usable("plain", CUDA)


def test_auto_takes_them_on_cuda_alone():
    assert kernels.usable("auto", CUDA)
    assert not kernels.usable("auto", CPU)
    assert not kernels.usable("auto", META)


def test_triton_by_name_runs_on_the_cpu_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.usable("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match=r"no kernels for cpu.*Pass kernels='auto'"):
        kernels.usable("triton", CPU)


def test_without_triton_auto_is_plain_and_triton_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(kernels, "_there", lambda: False)
    assert not kernels.usable("auto", CUDA)
    with pytest.raises(
        ConfigError, match=r"kernels='triton' was asked for.*pip install triton.*GS101"
    ):
        kernels.usable("triton", CUDA)


def test_after_a_failure_auto_is_plain_and_triton_says_what_it_was():
    with pytest.warns(GradscaleWarning, match=r"no ptxas.*kernels='plain'.*GS110"):
        kernels.give_up(RuntimeError("no ptxas"))
    assert not kernels.usable("auto", CUDA)
    with pytest.raises(ConfigError, match=r"failed before \(RuntimeError: no ptxas\)"):
        kernels.usable("triton", CUDA)


def test_a_failure_is_said_once():
    with pytest.warns(GradscaleWarning, match="first"):
        kernels.give_up(RuntimeError("first"))
    # A warning would be an error here.
    kernels.give_up(RuntimeError("second"))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_what_is_not_the_fault_of_triton_is_raised(kind):
    # Plain operations would meet the same, and the reason would be a wrong one.
    with pytest.raises(kind):
        kernels.fall_back(kind("not here"), "auto")
    assert kernels._broken is None


def test_no_kernel_is_taken_while_compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernels.usable("auto", CUDA)
    assert not kernels.usable("triton", CUDA)


class Broken:
    """A kernel that cannot be built."""

    def __call__(self, *args, **constants):
        raise RuntimeError("no ptxas")


KERNELS = {
    "read": (reading, "_read"),
    "gather": (reading, "_gather"),
    "decide": (deciding, "_gather_and_decide"),
    "adam": (adam, "_adam"),
    "momentum": (momentum, "_momentum"),
    "count": (counting, "_count"),
    "settle": (kernel_settling, "_settle"),
}
OPTIMIZERS = {
    "AdamW": lambda p, k: optim.AdamW(p, lr=0.125, kernels=k),
    "SGD": lambda p, k: optim.SGD(p, lr=0.125, momentum=0.5, dampening=0.5, kernels=k),
    "Lion": lambda p, k: optim.Lion(p, lr=0.125, kernels=k),
}


def train(make, kind, device, after=lambda step: None, norm_type=2.0):
    """Return scales, weights, state and counts of four steps, one of them skipped."""
    param = torch.nn.Parameter(torch.ones(5, device=device))
    scaler = GradScaler(device.type, 8.0, growth_interval=2, kernels=kind)
    optimizer, scales = make([param], kind), []
    for step, grad in enumerate((0.5, torch.inf, -2.0, 1.0)):
        after(step)
        optimizer.zero_grad()
        backward(scaler, param, torch.full((5,), grad, device=device))
        scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), scaler.last.applied))
    counts = int(scaler.applied_steps), int(scaler.skipped_steps)
    state = [v.clone() for v in optimizer.state[param].values()]
    return scales, counts, [param.detach().clone(), *state]


@pytest.fixture
def auto_runs(monkeypatch):
    """Let "auto" take kernels wherever they run: here, in the interpreter too."""

    def usable(kind, device):
        return kind != "plain" and kernels._broken is None

    for module in (readers, updating, settling):
        monkeypatch.setattr(module, "usable", usable)


def needs(name, optimizer):
    """Return whether a step of this optimizer launches that kernel."""
    return {
        "adam": optimizer == "AdamW",
        "momentum": optimizer != "AdamW",
        "count": optimizer != "Lion",
    }.get(name, True)


def norm_for(name):
    """Return an order of the norm for which that kernel is launched."""
    # A clip by the 2-norm is decided on in the launch that gathers.
    return math.inf if name == "gather" else 2.0


CASES = [(k, o) for k in KERNELS for o in OPTIMIZERS if needs(k, o)]
cases = pytest.mark.parametrize(
    ("name", "optimizer"), CASES, ids=[f"{k}-{o}" for k, o in CASES]
)


@cases
@pytest.mark.parametrize("fails_in", [0, 2])
@pytest.mark.usefixtures("auto_runs")
def test_a_kernel_that_fails_is_said_once_and_no_step_is_lost_or_taken_twice(
    device, monkeypatch, name, optimizer, fails_in
):
    module, kernel = KERNELS[name]

    def break_it(step):
        if step == fails_in:
            monkeypatch.setattr(module, kernel, Broken())

    make = OPTIMIZERS[optimizer]
    truth = train(make, "plain", device, norm_type=norm_for(name))
    # Not pytest.warns, which passes on what the interpreter says.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = train(make, "auto", device, break_it, norm_for(name))
    said = [str(w.message) for w in caught if w.category is GradscaleWarning]
    assert len(said) == 1
    assert "RuntimeError: no ptxas" in said[0]
    assert "GS110" in said[0]
    assert ours[:2] == truth[:2]
    for mine, other in zip(ours[2], truth[2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@cases
def test_who_asked_for_triton_by_name_gets_the_error(
    device, monkeypatch, name, optimizer
):
    module, kernel = KERNELS[name]
    monkeypatch.setattr(module, kernel, Broken())
    make, norm_type = OPTIMIZERS[optimizer], norm_for(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradscaleWarning)
        with pytest.raises(RuntimeError, match="no ptxas"):
            train(make, "triton", device, norm_type=norm_type)
    assert kernels._broken is None


def test_a_scaler_and_an_optimizer_without_triton_run_by_plain_operations(
    device, monkeypatch
):
    monkeypatch.setattr(kernels, "_there", lambda: False)
    make = OPTIMIZERS["AdamW"]
    assert train(make, "auto", device)[:2] == train(make, "plain", device)[:2]
    with pytest.raises(ConfigError, match="pip install triton"):
        train(make, "triton", device)


@pytest.mark.parametrize("made", [GradScaler, optim.SGD])
def test_a_kind_that_is_not_known_is_refused(made):
    first = "cpu" if made is GradScaler else [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match=r"cuda_graph.*auto.*plain.*triton"):
        made(first, kernels="cuda_graph")
