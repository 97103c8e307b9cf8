"""What only a CUDA device can show: no sync, graphs, its own kernels."""

import copy
import math
import warnings
from contextlib import contextmanager

import pytest
import torch

from gradscale import ScaleCollapsed, Verdict
from gradscale.torch import GradScaler

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)

FUSED = {"fused": True}
FOREACH = {"foreach": True}
PLAIN = {"foreach": False}
BAD_STEPS = (3, 4, 9)


@contextmanager
def no_sync():
    """Turn every synchronising call of torch into an error."""
    torch.cuda.synchronize()
    sync_debug_mode("error")
    try:
        yield
    finally:
        sync_debug_mode("default")


def sync_debug_mode(mode):
    with warnings.catch_warnings():
        # Torch says each time that the mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def small_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1)
    ).cuda()


def batch(step):
    torch.manual_seed(100 + step)
    x = torch.randn(8, 16, device="cuda")
    if step in BAD_STEPS:
        x[0, 0] = math.inf
    return x


def train(scaler, model, optimizer, steps, max_norm=None):
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean()).backward()
        if max_norm is not None:
            if isinstance(scaler, GradScaler):
                scaler.clip_grad_norm_(optimizer, max_norm)
            else:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("options", [FUSED, FOREACH, PLAIN], ids=str)
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_scales_and_weights_equal_those_of_torch(options, max_norm):
    ours, theirs = small_model(), small_model()
    settings = {"init_scale": 1024.0, "growth_interval": 3}
    runs = [
        train(
            scaler,
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2, **options),
            20,
            max_norm,
        )
        for scaler, model in (
            (GradScaler("cuda", **settings), ours),
            (torch.amp.GradScaler("cuda", **settings), theirs),
        )
    ]
    assert runs[0] == runs[1]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # Clipping in one multiplication rounds once where torch rounds twice.
        torch.testing.assert_close(
            mine, other, rtol=0.0 if max_norm is None else 1e-5, atol=1e-7
        )


def test_a_fused_step_with_clip_names_and_counts_never_syncs():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cuda", model=model)
    data = torch.zeros(8, 16, device="cuda")

    def steps():
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(model(data).square().mean()).backward()
            norm = scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        return norm, scaler.last

    # What torch sets up in a first step may sync.
    steps()
    with no_sync():
        norm, outcome = steps()
    assert norm.is_cuda
    assert outcome.applied
    assert scaler.applied_steps[optimizer] == 10


def test_a_plain_step_waits_for_one_flag_and_nothing_else(monkeypatch):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    scaler, waits = GradScaler("cuda"), []
    wait = torch.cuda.Event.synchronize

    def counted(event):
        waits.append(event)
        wait(event)

    for step in range(2):
        scaler.scale(model(batch(step)).square().mean()).backward()
        monkeypatch.setattr(torch.cuda.Event, "synchronize", counted)
        with no_sync():
            scaler.step(optimizer)
            scaler.update()
        monkeypatch.undo()
    # What is set up in the first step does not wait either.
    assert len(waits) == 2


def captured(scaler, model, optimizer, static_x):
    def iteration():
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(model(static_x).square().mean()).backward()
        scaler.clip_grad_norm_(optimizer, 0.05)
        scaler.step(optimizer)
        scaler.update()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        iteration()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    return graph


def test_a_captured_iteration_replays_right_through_overflows_and_growth():
    kinds = {"lr": 1e-2, "fused": True, "capturable": True}
    settings = {"init_scale": 1024.0, "growth_interval": 3}
    eager = small_model()
    static_x = torch.zeros(8, 16, device="cuda")
    replayed = copy.deepcopy(eager)
    runs = {}
    for name, model in (("eager", eager), ("graph", replayed)):
        optimizer = torch.optim.AdamW(model.parameters(), **kinds)
        scaler = GradScaler("cuda", model=model, **settings)
        if name == "graph":
            static_x.copy_(batch(0))
            graph = captured(scaler, model, optimizer, static_x)
        rows = []
        for step in range(16):
            if name == "graph":
                # The warm-up ran step 0; capturing runs nothing.
                if step > 0:
                    static_x.copy_(batch(step))
                    graph.replay()
            else:
                optimizer.zero_grad(set_to_none=False)
                scaler.scale(model(batch(step)).square().mean()).backward()
                scaler.clip_grad_norm_(optimizer, 0.05)
                scaler.step(optimizer)
                scaler.update()
            last = scaler.last
            rows.append((scaler.get_scale(), last.applied, last.culprits != ()))
        runs[name] = (rows, int(scaler.applied_steps), int(scaler.skipped_steps))
    assert runs["graph"] == runs["eager"]
    assert runs["eager"][2] == len(BAD_STEPS)
    assert max(scale for scale, _, _ in runs["eager"][0]) > 1024.0
    for mine, other in zip(replayed.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 511, -1])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_one_bad_element_anywhere_skips_and_is_named(bad, place, dtype):
    params = {
        name: torch.nn.Parameter(torch.zeros(size, device="cuda", dtype=dtype))
        for name, size in (("a", 1023), ("b", 4097), ("c", 1))
    }
    model = torch.nn.ParameterDict(params)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler("cuda", 4.0, model=model, allow_fp16=True)
    scaler.scale(torch.ones((), device="cuda"))
    for param in params.values():
        param.grad = torch.ones_like(param)
    params["b"].grad[place] = bad
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert scaler.last.culprits == ("b",)
    assert all(not param.any() for param in params.values())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_unscaling_by_a_power_of_two_is_exact(dtype):
    param = torch.nn.Parameter(torch.zeros(1000, device="cuda", dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cuda", 2.0**10, allow_fp16=True)
    scaler.scale(torch.ones((), device="cuda"))
    truth = torch.randn(1000, device="cuda").clamp(-8, 8).to(dtype)
    param.grad = truth * 2**10
    scaler.unscale_(optimizer)
    assert torch.equal(param.grad, truth)


def test_the_norm_does_not_overflow_where_the_true_norm_does_not():
    param = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cuda", 1.0)
    scaler.scale(torch.ones((), device="cuda"))
    param.grad = torch.full_like(param, 1e18)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert norm.item() == pytest.approx(math.sqrt(1000) * 1e18, rel=1e-6)
    assert scaler.last.applied
    assert param.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_collapse_is_noticed_late_and_leaves_the_weights_alone():
    param = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.AdamW([param], fused=True)
    scaler = GradScaler("cuda", 2.0**-22)

    def bad_steps():
        for _ in range(20):
            scaler.scale(torch.ones((), device="cuda"))
            param.grad = torch.full_like(param, math.nan)
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(ScaleCollapsed, match=r"floor of 5\.96046e-08"):
        bad_steps()
    assert scaler.last.verdict is Verdict.COLLAPSE
    assert torch.equal(param.detach(), torch.ones(4, device="cuda"))


def test_a_scale_on_the_cpu_serves_gradients_on_the_gpu():
    param = torch.nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
    scaler = GradScaler("cuda", 4.0)
    scaler.scale(torch.ones(5))
    param.grad = torch.full_like(param, 8.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.grad, torch.full_like(param, 2.0))
    assert scaler.last.applied


def test_a_flag_that_crosses_to_the_host_is_waited_for():
    param = torch.nn.Parameter(torch.ones(5, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
    scaler = GradScaler("cuda", 4.0)
    scaler.scale(torch.ones(5))
    param.grad = torch.full_like(param, math.inf)
    torch.cuda.synchronize()
    # About half a second: whoever reads too early reads what was there before.
    torch.cuda._sleep(10**9)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert torch.equal(param.detach(), torch.ones(5, device="cuda"))


# Dynamo warns of its own doing; here only the results count.
@pytest.mark.filterwarnings("default")
def test_compiled_methods_equal_eager_ones():
    runs = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cuda", 64.0, growth_interval=2)
        methods = [scaler.scale, scaler.unscale_, scaler.update]
        if compiled:
            methods = [torch.compile(method, fullgraph=True) for method in methods]
        scale, unscale_, update = methods
        for step in range(6):
            optimizer.zero_grad()
            scale(model(batch(step)).square().mean()).backward()
            unscale_(optimizer)
            scaler.step(optimizer)
            update()
        runs.append((scaler.get_scale(), [p.clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    for eager, graph in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(eager, graph)
