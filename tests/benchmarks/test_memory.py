"""What the benchmarks count as a scaler's memory, on figures that are made up."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import memory


@pytest.fixture
def gpu(monkeypatch):
    """An allocator that is made up: `use` takes bytes and `free` gives them back."""
    stats = {
        f"{kind}_bytes.{pool}_pool.{when}": 0
        for kind in ("allocated", "requested")
        for pool in ("small", "large")
        for when in ("current", "peak")
    }

    def use(kind, size):
        stats[f"{kind}.current"] += size
        peak = max(stats[f"{kind}.peak"], stats[f"{kind}.current"])
        stats[f"{kind}.peak"] = peak

    def reset():
        for kind in ("allocated_bytes.small_pool", "requested_bytes.large_pool"):
            stats[f"{kind}.peak"] = stats[f"{kind}.current"]

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    return SimpleNamespace(
        large=lambda size: use("requested_bytes.large_pool", size),
        small=lambda size: use("allocated_bytes.small_pool", size),
    )


class Optimizer:
    """An optimizer that needs `scratch` bytes for a while."""

    def __init__(self, gpu, scratch=0):
        self.gpu, self.scratch, self.state = gpu, scratch, {}

    def step(self):
        self.gpu.large(self.scratch)
        self.gpu.large(-self.scratch)


@pytest.mark.parametrize(
    ("size", "counted"),
    [(1, 512), (512, 512), (513, 1024), (2**20, 2**20), (2**20 + 4, 2**20 + 4)],
)
def test_only_small_blocks_are_rounded_up(size, counted):
    assert memory.footprint(size) == counted


def test_small_and_large_blocks_are_held(gpu):
    gpu.small(512)
    gpu.large(5_000_000)
    assert memory.held() == 5_000_512


def test_a_peak_is_what_a_step_needs_for_a_while(gpu):
    gpu.large(7_000_000)

    def step():
        gpu.large(3_000_000)
        gpu.large(-3_000_000)

    assert memory.peak_of(step) == 3_000_000


def test_what_a_scaler_keeps_is_counted(gpu):
    optimizer = Optimizer(gpu)
    meter = memory.Meter()
    meter.made(optimizer)
    gpu.small(1024)
    read = meter.read(optimizer.step, optimizer, param_bytes=4096)
    assert read == {"kept_bytes": 1024, "peak_bytes": 0, "memory_share": 0.25}


def test_the_state_of_the_optimizer_is_not_the_scalers(gpu, monkeypatch):
    states = iter([1_000_000, 9_000_000])
    monkeypatch.setattr(memory, "state_bytes", lambda optimizer: next(states))
    optimizer = Optimizer(gpu)
    meter = memory.Meter()
    meter.made(optimizer)
    gpu.large(8_000_000)
    assert meter.read(optimizer.step, optimizer, 1)["kept_bytes"] == 0


def test_what_the_optimizer_needs_for_a_while_is_not_the_scalers(gpu):
    optimizer = Optimizer(gpu, scratch=6_000_000)
    meter = memory.Meter()
    meter.made(optimizer)

    def step():
        gpu.large(2_000_000)
        optimizer.step()
        gpu.large(-2_000_000)

    assert meter.read(step, optimizer, 1)["peak_bytes"] == 2_000_000


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    @property
    def device(self):
        return torch.device("cuda")


def test_state_that_shares_a_storage_is_counted_once(gpu):
    whole = torch.zeros(1000).as_subclass(OnGpu)
    optimizer = Optimizer(gpu)
    optimizer.state = {0: {"step": whole[:500]}, 1: {"step": whole[500:]}}
    assert memory.state_bytes(optimizer) == 4096


def test_tensors_on_the_host_are_no_memory_of_the_gpu():
    param = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.AdamW([param], foreach=True)
    param.grad = torch.ones(4)
    optimizer.step()
    assert memory.state_bytes(optimizer) == 0
