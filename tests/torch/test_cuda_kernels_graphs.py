"""Kernels in CUDA graphs: replays are right, whatever happens between them."""

import subprocess
import sys

import pytest
import torch

from gradscale.torch import GradScaler, optim
from gradscale.torch.kernels import torch_fused_adam as standing_in
from gradscale.torch.kernels.torch_fused_adam import StandIn
from tests.torch.graphs import assert_equal, twins
from tests.torch.on_cuda import BAD_STEPS, OWN

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)

STEPS = 16


def on_the_device(make):
    """Return a maker whose learning rate lies on the device."""

    def with_rate(params, **how):
        optimizer = make(params, **how)
        group = optimizer.param_groups[0]
        group["lr"] = torch.tensor(group["lr"], device="cuda")
        return optimizer

    return with_rate


MAKES = OWN | {f"{name}, lr on device": on_the_device(OWN[name]) for name in OWN}
makes = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@makes
@pytest.mark.parametrize("set_to_none", [True, False])
def test_replays_are_right_through_overflows_and_growth(make, set_to_none):
    graphed, eager = twins(make)
    # With gradients that stay, they are there before the capture.
    graphed.warm_up(0, set_to_none=set_to_none)
    rows = [graphed.row()]
    graph = graphed.capture(set_to_none=set_to_none)
    for step in range(1, STEPS):
        graphed.replay(graph, step)
        rows.append(graphed.row())
    expected = []
    for step in range(STEPS):
        eager.eagerly(step, set_to_none=set_to_none)
        expected.append(eager.row())
    assert rows == expected
    assert eager.counts() == (STEPS - len(BAD_STEPS), len(BAD_STEPS))
    assert max(scale for scale, _, _ in rows) > 1024.0
    assert_equal(graphed, eager)


def fused_adamw(params, kernels):
    """Return torch's own, for which a kernel stands in."""
    return torch.optim.AdamW(params, lr=0.01, fused=True, capturable=True)


def test_replays_take_back_the_counts_of_skipped_steps(monkeypatch):
    monkeypatch.setattr(standing_in, "FEW", 0)
    graphed, eager = twins(fused_adamw)
    graphed.warm_up(0)
    graph = graphed.capture()
    for step in range(1, STEPS):
        graphed.replay(graph, step)
    for step in range(STEPS):
        eager.eagerly(step)
    assert_equal(graphed, eager)
    for one in (graphed, eager):
        counts = [one.optimizer.state[p]["step"] for p in one.model.parameters()]
        assert {int(count) for count in counts} == {STEPS - len(BAD_STEPS)}


def test_a_graph_of_a_step_that_was_never_taken_before_is_replayed_right(monkeypatch):
    monkeypatch.setattr(standing_in, "FEW", 0)
    params = [torch.nn.Parameter(torch.ones(5, device="cuda")) for _ in range(2)]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in params]
    ours, torchs = fused_adamw(params, None), fused_adamw(theirs, None)
    flag, scale = torch.zeros((), device="cuda"), torch.full((), 4.0, device="cuda")
    for param, other in zip(params, theirs, strict=True):
        param.grad, other.grad = torch.ones_like(param), torch.ones_like(param)
    # The state and the compiled kernel are made by another flag and other betas.
    ours.param_groups[0]["betas"] = (0.5, 0.5)
    for optimizer in (ours, torchs):
        optimizer.grad_scale, optimizer.found_inf = scale, flag
    ours.found_inf = StandIn("triton").flag(ours, flag)
    flag.fill_(1.0)
    ours.step()
    torchs.step()
    ours.param_groups[0]["betas"] = (0.9, 0.999)
    stand_in, graph = StandIn("triton"), torch.cuda.CUDAGraph()
    ours.found_inf = stand_in.flag(ours, flag)
    with torch.cuda.graph(graph):
        ours.step()
    flag.fill_(0.0)
    for _ in range(3):
        graph.replay()
        torchs.step()
    for param, other in zip(params, theirs, strict=True):
        assert torch.equal(param, other)
        assert torch.equal(ours.state[param]["step"], torchs.state[other]["step"])
        # One division for each step.
        assert torch.equal(param.grad, other.grad)


def test_a_replay_reads_the_learning_rate_of_now():
    graphed, eager = twins(on_the_device(OWN["SGD"]))
    graphed.warm_up(0)
    eager.eagerly(0)
    graph = graphed.capture()
    for step, rate in ((1, 0.5), (2, 0.0), (5, 0.125)):
        for one in (graphed, eager):
            one.optimizer.param_groups[0]["lr"].fill_(rate)
        graphed.replay(graph, step)
        eager.eagerly(step)
    assert_equal(graphed, eager)


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_eager_steps_between_replays_do_not_disturb_them(make):
    graphed, eager = twins(make)
    graphed.warm_up(0)
    eager.eagerly(0)
    graph = graphed.capture()
    kept = []
    for step in range(1, 13):
        if step % 3 == 0:
            graphed.eagerly(step)
            # They stay alive: the next ones must lie elsewhere.
            kept.append([p.grad for p in graphed.model.parameters()])
        else:
            graphed.replay(graph, step)
        eager.eagerly(step)
    assert_equal(graphed, eager)


def test_the_staging_memory_of_a_graph_is_never_given_away():
    # Lion has no counts: a table of zeros, should one be copied, touches no memory.
    graphed, eager = twins(OWN["Lion"])
    graphed.warm_up(0)
    eager.eagerly(0)
    graph = graphed.capture()
    # Whoever asks for pinned memory now must not be given that of the graph.
    taken = [
        torch.zeros(2**power, dtype=torch.int64).pin_memory()
        for power in range(13)
        for _ in range(16)
    ]
    for step in (1, 2, 5):
        graphed.replay(graph, step)
        eager.eagerly(step)
    assert_equal(graphed, eager)
    assert not any(memory.any() for memory in taken)


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("capture after tables", 1),
        ("capture after tables", 12),
        ("graphs in any order", 2),
        ("graphs in any order", 7),
        ("eager before the first replay", 2),
    ],
)
def test_in_a_process_of_its_own(case, count):
    command = [sys.executable, "-m", "tests.torch.graphs", case, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def train_half(by_graph):
    """Return an f16 weight and its master after some steps."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3000, device="cuda").half())
    optimizer = optim.AdamW([weight], lr=0.01, kernels="triton")
    scaler = GradScaler("cuda", 64.0, kernels="triton")
    weight.grad = torch.zeros_like(weight)
    pull = torch.zeros_like(weight.grad)
    one, graph = torch.ones((), device="cuda"), None

    def take_step():
        scaler.scale(one)
        weight.grad.copy_(pull)
        scaler.step(optimizer)
        scaler.update()

    for step in range(8):
        torch.manual_seed(step)
        pull.copy_(torch.randn(3000, device="cuda"))
        if by_graph and step == 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                take_step()
        if graph is None:
            take_step()
        else:
            graph.replay()
    return weight.detach(), optimizer.state[weight]["master"]


def test_half_parameters_with_masters_replay_right():
    ours, theirs = train_half(True), train_half(False)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[0], ours[1].half())
