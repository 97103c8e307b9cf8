"""A batch whose step was skipped runs again at a lower scale."""

import random

import pytest
import torch
from torch import nn

from gradscale import ConfigError, GradscaleWarning, OrderError, StaticScale
from gradscale.torch import GradScaler, attempts, master_params, master_weights
from tests.torch.training import INF, NAN, OPTIMIZERS, parameter, planted

SGD = torch.optim.SGD
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Net(nn.Module):
    """Dropout, BatchNorm, and noise of Python and torch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.noise = []

    def forward(self, x):
        self.noise.append((random.random(), torch.rand(()).item()))
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.5))


def overflowing(loss, limit):
    """Return the loss; its gradient overflows where the scale is above a limit."""
    return _Limited.apply(loss, limit)


class _Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, limit):
        ctx.limit = limit
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.where(grad > ctx.limit, torch.full_like(grad, INF), grad), None


def train(scaler, batches, limits, make, retries=8):
    """Return the net after one step a batch, and the attempts of each."""
    net, tries = Net(), [0] * len(batches)
    optimizer = make(list(net.parameters()), lr=0.05)
    torch.manual_seed(1)
    random.seed(1)
    for place, (batch, limit) in enumerate(zip(batches, limits, strict=True)):
        for attempt in attempts(scaler, net, retries=retries):
            tries[place] = attempt + 1
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            scaler.scale(overflowing(loss, limit)).backward()
            scaler.step(optimizer)
            scaler.update()
    return net, tries


def batches(count):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(16, 3, generator=generator) for _ in range(count)]


@optimizers
def test_no_batch_is_lost_and_the_weights_are_those_of_a_safe_scale(make):
    # Every twentieth batch overflows above 2**10, or above 2**6.
    limits = [2.0 ** (10 if n % 40 else 6) if n % 20 == 0 else INF for n in range(60)]
    scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=10)
    net, tries = train(scaler, batches(60), limits, make)
    assert scaler.applied_steps == 60
    assert max(tries) > 2
    safe, once = train(
        GradScaler("cpu", policy=StaticScale(scale=2.0**4)),
        batches(60),
        [INF] * 60,
        make,
    )
    assert once == [1] * 60
    assert all(map(torch.equal, net.parameters(), safe.parameters()))
    assert all(map(torch.equal, net.buffers(), safe.buffers()))
    # Each attempt has drawn the same numbers.
    drawn = [
        noise for noise, n in zip(safe.noise, tries, strict=True) for _ in range(n)
    ]
    assert net.noise == drawn


def test_a_loss_that_is_not_finite_is_not_tried_again():
    scaler, net = GradScaler("cpu"), Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    before = [buffer.clone() for buffer in net.buffers()]
    count = 0
    for _ in attempts(scaler, net):
        count += 1
        optimizer.zero_grad()
        loss = net(torch.full((4, 3), NAN)).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert count == 1
    assert not scaler.last.applied
    # A lost batch leaves no trace in the buffers.
    assert all(map(torch.equal, net.buffers(), before))


def test_the_batch_is_lost_after_the_last_attempt():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    optimizer, model = SGD([param], lr=1.0), nn.Identity()
    count = 0
    for _ in attempts(scaler, model, retries=2):
        count += 1
        optimizer.zero_grad()
        scaler.scale(planted(param, INF)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (count, scaler.get_scale(), param.item()) == (3, 1.0, 0.0)


def test_gradients_are_cleared_for_a_further_attempt():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    model = nn.ParameterList([param])
    optimizer = SGD([param], lr=1.0)
    optimizer.zero_grad()
    for attempt in attempts(scaler, model):
        # No zero_grad inside.
        scaler.scale(planted(param, INF if attempt == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (attempt, param.item()) == (1, -1.0)


def test_a_micro_batch_is_tried_again_and_the_window_kept():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    model = nn.ParameterList([param])
    optimizer = SGD([param], lr=1.0)
    counts = [0, 0, 0]
    for place, (grad, limit) in enumerate(((1.0, INF), (2.0, 2.0), (4.0, INF))):
        for _ in attempts(scaler, model, micro_batch_of=optimizer):
            counts[place] += 1
            loss = overflowing(planted(param, grad), limit)
            scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert counts == [1, 3, 1]
    assert (param.item(), scaler.get_scale()) == (-7.0, 2.0)


def test_two_optimizers_with_different_outcomes_are_not_run_again():
    scaler, params = GradScaler("cpu"), [parameter(1), parameter(1)]
    steps = [SGD([param], lr=1.0) for param in params]
    loop = attempts(scaler, nn.ParameterList(params))
    assert next(loop) == 0
    scaler.scale(planted(params[0], 1.0) + planted(params[1], INF)).backward()
    for optimizer in steps:
        scaler.step(optimizer)
    scaler.update()
    with (
        pytest.warns(GradscaleWarning, match="one loop of attempts"),
        pytest.raises(StopIteration),
    ):
        next(loop)
    assert params[0].item() == -1.0


def test_a_body_without_an_update_is_refused():
    scaler, loop = GradScaler("cpu"), None
    loop = attempts(scaler, nn.Identity())
    next(loop)
    with pytest.raises(OrderError, match=r"without update\(\).*micro_batch_of"):
        next(loop)


@pytest.mark.parametrize("retries", [-1, 1.5, True])
def test_a_number_of_retries_that_is_none_is_refused(retries):
    with pytest.raises(ConfigError, match="retries="):
        next(attempts(GradScaler("cpu"), nn.Identity(), retries=retries))


def test_a_disabled_scaler_runs_the_body_once():
    scaler = GradScaler("cpu", enabled=False)
    assert list(attempts(scaler, nn.Identity())) == [0]


def test_numpy_draws_the_same_numbers_again():
    numpy = pytest.importorskip("numpy", reason="NumPy comes with torch's extras")
    scaler, param, drawn = GradScaler("cpu", init_scale=8.0), parameter(1), []
    optimizer = SGD([param], lr=1.0)
    for attempt in attempts(scaler, nn.ParameterList([param])):
        drawn.append(numpy.random.rand())
        scaler.scale(planted(param, INF if attempt == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(drawn) == 2
    assert drawn[0] == drawn[1]


def test_casts_that_autocast_keeps_are_dropped_before_a_further_attempt(monkeypatch):
    cleared = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(attempt))
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    optimizer = SGD([param], lr=1.0)
    for attempt in attempts(scaler, nn.ParameterList([param])):
        scaler.scale(planted(param, INF if attempt < 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert cleared == [0, 1]


def test_masters_of_float16_weights_are_left_alone_by_a_failed_attempt():
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = master_weights(SGD([param], lr=0.5))
    scaler = GradScaler("cpu", init_scale=8.0)
    for attempt in attempts(scaler, nn.ParameterList([param])):
        optimizer.zero_grad()
        scaler.scale(planted(param, INF if attempt == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    (master,) = master_params(optimizer)
    assert master.tolist() == [0.5, 0.5]
    assert param.tolist() == [0.5, 0.5]
