"""What the kernels promise on a CUDA device: no wait, no copy, the same results."""

import time

import pytest
import torch

from gradscale.torch import GradScaler, optim
from gradscale.torch.kernels import torch_fused_adam as standing_in
from tests.torch.on_cuda import (
    BAD_STEPS,
    OWN,
    batch,
    fused,
    is_busy,
    keep_busy,
    no_sync,
    small_model,
    take_step,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)

MAKES = OWN | {"fused": fused}
makes = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
# Each with so many layers: our kernel stands in for torch's where there are many.
LAYERED = {name: (make, 1) for name, make in MAKES.items()} | {
    "stood in for": (fused, standing_in.FEW)
}
layered = pytest.mark.parametrize(("make", "layers"), LAYERED.values(), ids=LAYERED)
# What a step may take on the host while the device is busy for BUSY_MS.
HOST_SECONDS, BUSY_MS = 0.020, 200.0
# Calls of the CUDA runtime and driver that wait for the device.
WAITS = {
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cudaMemset",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
}


def ready(make, layers=1, **how):
    """Return a scaler, a model and an optimizer that have taken some steps."""
    model = small_model(layers)
    optimizer = make(model.parameters())
    scaler = GradScaler("cuda", 1024.0, model=model, **how)
    x = batch(0)
    for _ in range(8):
        take_step(scaler, model, optimizer, x)
    torch.cuda.synchronize()
    return scaler, model, optimizer, x


@layered
def test_a_whole_step_returns_while_the_device_is_busy(make, layers):
    scaler, model, optimizer, x = ready(make, layers)
    took = []
    for _ in range(3):
        torch.cuda.synchronize()
        keep_busy(BUSY_MS)
        begin = time.perf_counter()
        take_step(scaler, model, optimizer, x)
        outcome = scaler.last
        took.append(time.perf_counter() - begin)
        assert is_busy()
    # The shortest: the host may have been busy with something else.
    assert min(took) < HOST_SECONDS
    assert outcome.applied


@layered
def test_no_call_of_a_step_syncs(make, layers):
    scaler, model, optimizer, x = ready(make, layers)
    with no_sync():
        for _ in range(5):
            take_step(scaler, model, optimizer, x)
            outcome = scaler.last
    assert outcome.applied


# Torch's profiler warns of its own doing; here only what it saw counts.
@pytest.mark.filterwarnings("default")
@layered
def test_the_profiler_sees_no_call_that_waits(make, layers):
    scaler, model, optimizer, x = ready(make, layers)
    kinds = [
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    ]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(3):
            # Whatever is waited for in the step has arrived: no wait is needed.
            torch.cuda.synchronize()
            with torch.profiler.record_function("whole step"):
                take_step(scaler, model, optimizer, x)
        torch.cuda.synchronize()
    events = profile.events()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.name == "whole step"
        and event.device_type == torch.autograd.DeviceType.CPU
    ]
    assert len(spans) == 3
    # Beyond the steps, the test and the profiler wait.
    inside = {
        event.name
        for event in events
        if any(start <= event.time_range.start <= end for start, end in spans)
    }
    if not any("LaunchKernel" in name for name in inside):
        pytest.skip("the profiler sees no calls of CUDA on this machine")
    assert not inside & WAITS


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    ],
    ids=["SGD", "AdamW"],
)
def test_a_foreach_optimizer_costs_one_flag(monkeypatch, make):
    scaler, model, optimizer, x = ready(make)
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    waits, synchronize = [], torch.cuda.Event.synchronize

    def counted(event):
        waits.append(event)
        synchronize(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", counted)
    with no_sync():
        scaler.step(optimizer)
    assert len(waits) == 1
    monkeypatch.undo()
    scaler.update()
    assert scaler.last.applied


@pytest.mark.parametrize("kind", ["auto", "plain"])
def test_the_flag_does_not_wait_for_what_is_queued_after_it(kind):
    scaler, model, optimizer, x = ready(
        lambda p: torch.optim.SGD(p, lr=0.01, foreach=True), kernels=kind
    )
    took = []
    for _ in range(3):
        torch.cuda.synchronize()
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        keep_busy(BUSY_MS)
        begin = time.perf_counter()
        scaler.step(optimizer)
        took.append(time.perf_counter() - begin)
        assert is_busy()
        scaler.update()
    assert min(took) < HOST_SECONDS
    assert scaler.last.applied


@makes
def test_no_copy_of_the_gradients_is_made(make):
    # 12 * (2048^2 + 2048): 50 million parameters, 200 MB.
    model = torch.nn.Sequential(
        *(torch.nn.Linear(2048, 2048, device="cuda") for _ in range(12))
    )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    optimizer, scaler = make(model.parameters()), GradScaler("cuda", 8.0, model=model)

    def end_of_step():
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(4):
        scaler.scale(torch.ones((), device="cuda"))
        end_of_step()
    scaler.scale(torch.ones((), device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    end_of_step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 0.005 * size
    assert scaler.last.applied


def run(make, kind, max_norm, steps=14):
    model = small_model()
    how = {} if make is fused else {"kernels": kind}
    optimizer = make(model.parameters(), **how)
    scaler = GradScaler("cuda", 1024.0, growth_interval=3, model=model, kernels=kind)
    rows = []
    for step in range(steps):
        take_step(scaler, model, optimizer, batch(step), max_norm=max_norm)
        last = scaler.last
        facts = (scaler.get_scale(), last.applied, last.verdict, last.culprits)
        rows.append((*facts, f"{last.amax:.5g}"))
    counts = int(scaler.applied_steps), int(scaler.skipped_steps)
    return rows, counts, [p.detach() for p in model.parameters()]


@makes
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_plain_operations_on_cuda_give_the_same_run(make, max_norm):
    ours, theirs = (run(make, kind, max_norm) for kind in ("auto", "plain"))
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1] == (14 - len(BAD_STEPS), len(BAD_STEPS))
    for mine, other in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_auto_takes_kernels():
    scaler = GradScaler("cuda")
    optimizer = OWN["AdamW"]([torch.nn.Parameter(torch.ones(3, device="cuda"))])
    assert scaler.path(optimizer).kernels == "triton"


def test_staging_memory_is_not_written_while_a_copy_is_under_way():
    params = [torch.nn.Parameter(torch.zeros(70, device="cuda")) for _ in range(3)]
    optimizer = optim.SGD(params, lr=1.0)
    grads = [
        [torch.full((70,), 2.0**i, device="cuda") for _ in params] for i in range(14)
    ]

    def step(number):
        for param, grad in zip(params, grads[number], strict=True):
            param.grad = grad
        optimizer.step()

    # Built and started once; nothing is left to make but tables.
    step(0)
    step(1)
    torch.cuda.synchronize()
    keep_busy(300.0)
    # All gradients are alive, so each step has a table of its own.
    for number in range(2, 14):
        step(number)
    assert is_busy()
    torch.cuda.synchronize()
    # Each power of two once: the sum says which steps were taken.
    assert [param[0].item() for param in params] == [1.0 - 2.0**14] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_kernels_run_where_the_tensors_are_not_on_the_current_device(make):
    ends = []
    for device in ("cuda:0", "cuda:1"):
        assert torch.cuda.current_device() == 0
        model = small_model().to(device)
        optimizer = make(model.parameters(), kernels="triton")
        scaler = GradScaler("cuda", 1024.0, kernels="triton")
        for step in range(4):
            take_step(scaler, model, optimizer, batch(step).to(device))
        ends.append([p.detach().cpu() for p in model.parameters()])
    assert all(map(torch.equal, *ends))
