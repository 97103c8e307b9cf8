"""Optimizers that evaluate the loss themselves."""

import pytest
import torch
from torch import nn

from gradscale import ConfigError, OrderError
from gradscale.torch import GradScaler, master_weights, optim, step_with_closure
from tests.torch.loops.test_attempts import overflowing
from tests.torch.training import INF, NAN, OPTIMIZERS, parameter, planted

LBFGS = torch.optim.LBFGS


def closure_of(scaler, optimizer, loss_of):
    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        scaler.scale(loss).backward()
        return loss

    return closure


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("limit", [INF, 2.0**10])
def test_lbfgs_takes_the_steps_of_float32(search, limit):
    def train(scaler):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4))
        optimizer = LBFGS([weight], lr=0.5, max_iter=5, line_search_fn=search)

        def loss_of():
            loss = (weight - torch.arange(4.0)).pow(4).sum()
            return overflowing(loss, limit) if scaler else loss

        losses = []
        for _ in range(4):
            if scaler:
                closure = closure_of(scaler, optimizer, loss_of)
                losses.append(step_with_closure(scaler, optimizer, closure).item())
                scaler.update()
                continue

            def plain():
                optimizer.zero_grad()
                loss = loss_of()
                loss.backward()
                return loss

            losses.append(optimizer.step(plain).item())
        return weight, losses

    scaler = GradScaler("cpu", init_scale=2.0**16)
    weight, losses = train(scaler)
    reference, expected = train(None)
    # Powers of two: the gradients are the same bits.
    assert torch.equal(weight, reference)
    assert losses == expected
    assert scaler.get_scale() == min(2.0**16, limit)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_steps_by_a_closure(make):
    scaler, param, twin = GradScaler("cpu"), parameter(2), parameter(2)
    optimizer, plain = make([param], lr=1.0), make([twin], lr=1.0)
    closure = closure_of(scaler, optimizer, lambda: planted(param, 0.5))
    if not hasattr(optimizer, "seen") and not hasattr(optimizer, "scalers"):
        step_with_closure(scaler, optimizer, closure)
        scaler.update()
        other = GradScaler("cpu")
        other.scale(planted(twin, 0.5)).backward()
        other.step(plain)
        assert torch.equal(param, twin)
        assert scaler.last.applied


def test_a_first_evaluation_that_no_scale_helps_is_a_skip():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2, value=1.0)
    optimizer = LBFGS([param])
    closure = closure_of(scaler, optimizer, lambda: planted(param, INF))
    assert step_with_closure(scaler, optimizer, closure, retries=2) is None
    scaler.update()
    assert param.tolist() == [1.0, 1.0]
    assert not optimizer.state[param]
    assert not scaler.last.applied
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bad_loss_at_a_trial_point_does_not_reach_the_weights(bad):
    scaler = GradScaler("cpu", init_scale=8.0)
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = LBFGS([weight], lr=1.0, line_search_fn="strong_wolfe")

    def loss_of():
        loss = -weight.sum() * 100 + weight.square().sum()
        return loss * bad if weight.item() > 20.0 else loss

    closure = closure_of(scaler, optimizer, loss_of)
    for _ in range(3):
        step_with_closure(scaler, optimizer, closure)
        scaler.update()
        assert torch.isfinite(weight).all()
        assert weight.item() <= 20.0


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around descent, as its users write it."""

    def __init__(self, params, lr, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        moves = [p.grad * (self.param_groups[0]["rho"] / norm) for p in params]
        for param, move in zip(params, moves, strict=True):
            param.add_(move)
        closure()
        for param, move in zip(params, moves, strict=True):
            param.sub_(move)
            self.state[param]["steps"] = self.state[param].get("steps", 0) + 1
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])
        return loss


def test_sam_takes_the_steps_of_float32():
    def train(scaler):
        weight = nn.Parameter(torch.tensor([3.0, -1.0]))
        optimizer = SAM([weight], lr=0.01)
        for _ in range(5):
            if scaler:
                closure = closure_of(scaler, optimizer, lambda: weight.pow(4).sum())
                step_with_closure(scaler, optimizer, closure)
                scaler.update()
            else:

                def plain():
                    optimizer.zero_grad()
                    loss = weight.pow(4).sum()
                    loss.backward()
                    return loss

                optimizer.step(plain)
        return weight

    assert torch.equal(train(GradScaler("cpu")), train(None))


def test_an_overflow_in_the_second_pass_of_sam_sets_everything_back():
    scaler, weight = GradScaler("cpu", init_scale=8.0), nn.Parameter(torch.ones(1))
    optimizer = SAM([weight], lr=0.1)
    calls = []

    def loss_of():
        calls.append(weight.item())
        return planted(weight, INF if len(calls) > 1 else 1.0)

    closure = closure_of(scaler, optimizer, loss_of)
    assert step_with_closure(scaler, optimizer, closure, retries=1) is None
    scaler.update()
    assert weight.item() == 1.0
    assert not optimizer.state
    assert not scaler.last.applied


def test_a_skip_with_a_closure_keeps_masters_and_state():
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = master_weights(SAM([param], lr=2.0**-13))
    scaler = GradScaler("cpu", init_scale=8.0)
    factors = iter([1.0, 1.0, 1.0, INF, INF, INF])
    closure = closure_of(
        scaler, optimizer, lambda: param.float().square().sum() * next(factors)
    )
    assert step_with_closure(scaler, optimizer, closure, retries=1) is not None
    scaler.update()
    (master,) = optimizer.targets()
    before = master.detach().clone()
    assert not torch.equal(before, before.half().float())
    assert step_with_closure(scaler, optimizer, closure, retries=1) is None
    scaler.update()
    assert not scaler.last.applied
    # What the next step starts from.
    with torch.no_grad():
        optimizer._update_masters()
    assert torch.equal(master, before)
    assert optimizer.state[param]["steps"] == 1


def test_float16_weights_of_an_own_optimizer_are_refused_with_the_way():
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), optim.SGD([param], lr=0.5)
    closure = closure_of(scaler, optimizer, lambda: param.float().sum())
    with pytest.raises(
        OrderError, match=r"Call closure\(\) and then scaler\.step\(opti.*GS108"
    ):
        step_with_closure(scaler, optimizer, closure)
    closure()
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 0.5]


def test_a_closure_given_to_step_is_refused_with_the_way():
    scaler, param = GradScaler("cpu"), parameter(1)
    scaler.scale(planted(param, 1.0)).backward()
    with pytest.raises(OrderError, match="step_with_closure"):
        scaler.step(LBFGS([param]), lambda: None)


def test_what_cannot_be_called_is_refused():
    scaler, param = GradScaler("cpu"), parameter(1)
    with pytest.raises(ConfigError, match="closure=1 cannot be called"):
        step_with_closure(scaler, LBFGS([param]), 1)


def test_a_disabled_scaler_steps_the_optimizer():
    scaler, param = GradScaler("cpu", enabled=False), parameter(1, value=1.0)
    optimizer = LBFGS([param], lr=0.5, max_iter=1)
    closure = closure_of(scaler, optimizer, lambda: param.square().sum())
    assert step_with_closure(scaler, optimizer, closure).item() == 1.0
    assert param.item() != 1.0


def fitted(seed, *, half):
    """Return the float32 loss after LBFGS has fitted noisy data."""
    torch.manual_seed(seed)
    x = torch.rand(48, 3) * 2 - 1
    y = (3 * x[:, :1]).sin() + 0.3 * torch.randn(48, 1)
    model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    # So high that the first evaluations overflow.
    scaler = GradScaler("cpu", init_scale=2.0**24, growth_interval=10, enabled=half)

    def loss_of():
        with torch.autocast("cpu", torch.float16, enabled=half):
            output = model(x)
        return (output.float() - y).square().mean()

    for _ in range(8):
        step_with_closure(scaler, optimizer, closure_of(scaler, optimizer, loss_of))
        scaler.update()
    overflowed = half and scaler.get_scale() < 2.0**24
    return (model(x) - y).square().mean().item(), overflowed


@pytest.mark.parametrize("seed", range(5))
def test_lbfgs_in_float16_with_overflows_fits_as_well_as_float32(seed):
    half, overflowed = fitted(seed, half=True)
    full, _ = fitted(seed, half=False)
    assert overflowed
    assert half <= 1.1 * full


def test_lbfgs_steps_float32_masters_of_float16_weights():
    param = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float16))
    inner = LBFGS([param], line_search_fn="strong_wolfe")
    optimizer, scaler = master_weights(inner), GradScaler("cpu", init_scale=2.0**20)
    closure = closure_of(scaler, optimizer, lambda: (param.float() - 1).square().sum())
    before = closure().item()
    scaler.reset()
    step_with_closure(scaler, optimizer, closure)
    scaler.update()
    assert scaler.last.applied
    assert (param.float() - 1).square().sum().item() < 1e-4 * before
