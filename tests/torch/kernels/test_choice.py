"""When kernels are taken, and what happens where one cannot be built or launched."""

from types import SimpleNamespace

import pytest
import torch

from gradscale.errors import ConfigError, GradscaleWarning
from gradscale.torch import GradScaler, kernels, optim
from gradscale.torch.device_state import update as device_update
from gradscale.torch.device_state import update_kernel
from gradscale.torch.kernels import adam, grad_reader, launch, momentum
from gradscale.torch.kernels import decide as deciding
from gradscale.torch.kernels import optimizer_pass as updating
from gradscale.torch.kernels import read as reading
from gradscale.torch.kernels import step_counter as counting
from tests.torch.training import backward

CPU, CUDA, META = (torch.device(kind) for kind in ("cpu", "cuda", "meta"))


@pytest.fixture
def probed(monkeypatch):
    """Forget earlier probes; return the devices probed, and what a probe raises."""
    state = {"devices": [], "error": None}

    def probe(out):
        state["devices"].append(out.device.type)
        if state["error"] is not None:
            raise state["error"]

    def here(*shape, device, **how):
        return SimpleNamespace(device=device)

    monkeypatch.setattr(kernels, "_probed", {})
    monkeypatch.setattr(kernels, "_warned", set())
    monkeypatch.setattr(launch, "probe_", probe)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "empty", here)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return state


def test_plain_never_takes_kernels(probed):
    assert not kernels.usable("plain", CPU)
    assert not kernels.usable("plain", CUDA)
    assert probed["devices"] == []


def test_auto_takes_them_on_cuda_alone(probed):
    assert kernels.usable("auto", CUDA)
    assert not kernels.usable("auto", CPU)
    assert not kernels.usable("auto", META)
    assert probed["devices"] == ["cuda"]


def test_a_device_is_probed_once(probed):
    for kind in ("auto", "triton", "auto"):
        assert kernels.usable(kind, CUDA)
    assert probed["devices"] == ["cuda"]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled here, not interpreted"
)
def test_triton_by_name_runs_on_the_cpu_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.usable("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match=r"no kernels for cpu.*Pass kernels='auto'"):
        kernels.usable("triton", CPU)


def test_without_triton_auto_is_plain_and_triton_names_the_package(monkeypatch):
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert not kernels.usable("auto", CUDA)
    with pytest.raises(
        ConfigError, match=r"kernels='triton' was passed.*pip install triton.*GS101"
    ):
        kernels.usable("triton", CUDA)


def test_after_a_failed_probe_auto_is_plain_with_one_warning(probed):
    probed["error"] = RuntimeError("no ptxas.")
    with pytest.warns(
        GradscaleWarning, match=r"RuntimeError: no ptxas\. Plain.*='plain'.*GS110"
    ):
        assert not kernels.usable("auto", CUDA)
    # A warning would be an error here.
    assert not kernels.usable("auto", CUDA)
    assert probed["devices"] == ["cuda"]


def test_after_a_failed_probe_triton_raises_the_reason(probed):
    probed["error"] = OSError("no ptxas")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"OSError: no ptxas.*kernels='auto'"):
            kernels.usable("triton", CUDA)
    with pytest.warns(GradscaleWarning, match="no ptxas"):
        assert not kernels.usable("auto", CUDA)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_that_triton_did_not_cause_is_raised(probed, kind):
    # Plain operations would meet the same, and the reason would be a wrong one.
    probed["error"] = kind("full")
    with pytest.raises(kind):
        kernels.usable("auto", CUDA)
    probed["error"] = None
    assert kernels.usable("auto", CUDA)


def test_nothing_is_probed_while_a_graph_is_captured(probed, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "capturing", lambda device: True)
        assert not kernels.usable("auto", CUDA)
        assert kernels.usable("triton", CUDA)
        assert probed["devices"] == []
    assert kernels.usable("auto", CUDA)
    monkeypatch.setattr(kernels, "capturing", lambda device: True)
    assert kernels.usable("auto", CUDA)


def test_the_probe_runs_a_kernel(device):
    out = torch.zeros(1, device=device)
    launch.probe_(out)
    assert out.item() == 1.0


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
    "decide": (deciding, "_gather_and_decide"),
    "adam": (adam, "_own"),
    "momentum": (momentum, "_momentum"),
    "count": (counting, "_count"),
    "update": (update_kernel, "_update"),
}
OPTIMIZERS = {
    "AdamW": lambda p, k: optim.AdamW(p, lr=0.125, kernels=k),
    "SGD": lambda p, k: optim.SGD(p, lr=0.125, momentum=0.5, dampening=0.5, kernels=k),
    "Lion": lambda p, k: optim.Lion(p, lr=0.125, kernels=k),
}


def train(make, kind, device, norm_type=2.0):
    """Return scales, weights, state and counts of four steps, one of them skipped."""
    param = torch.nn.Parameter(torch.ones(5, device=device))
    scaler = GradScaler(device.type, 8.0, growth_interval=2, kernels=kind)
    optimizer, scales = make([param], kind), []
    for grad in (0.5, torch.inf, -2.0, 1.0):
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
    for module in (grad_reader, updating, device_update):
        monkeypatch.setattr(module, "usable", lambda kind, device: kind != "plain")


def needs(name, optimizer):
    """Return whether a step of this optimizer launches that kernel."""
    return {
        "adam": optimizer == "AdamW",
        "momentum": optimizer != "AdamW",
        "count": optimizer != "Lion",
    }.get(name, True)


CASES = [(k, o) for k in KERNELS for o in OPTIMIZERS if needs(k, o)]
cases = pytest.mark.parametrize(
    ("name", "optimizer"), CASES, ids=[f"{k}-{o}" for k, o in CASES]
)


@cases
@pytest.mark.parametrize("kind", ["auto", "triton"])
@pytest.mark.usefixtures("auto_runs")
def test_a_kernel_that_fails_after_the_probe_is_an_error(
    device, monkeypatch, name, optimizer, kind
):
    module, kernel = KERNELS[name]
    monkeypatch.setattr(module, kernel, Broken())
    with pytest.raises(RuntimeError, match="no ptxas"):
        train(OPTIMIZERS[optimizer], kind, device)


def test_a_scaler_and_an_optimizer_without_triton_run_by_plain_operations(
    device, monkeypatch
):
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    make = OPTIMIZERS["AdamW"]
    assert train(make, "auto", device)[:2] == train(make, "plain", device)[:2]
    with pytest.raises(ConfigError, match="pip install triton"):
        train(make, "triton", device)


@pytest.mark.parametrize("made", [GradScaler, optim.SGD])
def test_a_kind_that_is_not_known_is_refused(made):
    first = "cpu" if made is GradScaler else [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match=r"cuda_graph.*auto.*plain.*triton"):
        made(first, kernels="cuda_graph")
