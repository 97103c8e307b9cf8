"""Wrong and delicate loops of several losses, clips and skipped steps.

Each has a right result, or ends in an error or a warning with a code: at the first
step; a clip whose limit is no round number, or of each parameter, within the first
eight. The threads behind them are clusters H (18: clipping or logging
gradients that are still scaled), L (16: silent damage) and O (12: several losses, GANs,
gradient penalties, closures) of the survey.
"""

import math
import warnings

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from gradscale import GradscaleWarning, OrderError, Verdict
from gradscale.torch import GradScaler, optim, step_with_closure
from gradscale.torch.scaled_loss import is_scaled
from tests.torch.training import INF, NAN, OPTIMIZERS, parameter, planted

SGD = torch.optim.SGD
SCALE = 2.0**10
kinds = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def scaler_of(*models, **settings):
    return GradScaler(
        "cpu", init_scale=SCALE, model=models[0] if models else None, **settings
    )


@pytest.fixture
def coded():
    """Make every warning with a code an error: nothing may be reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradscaleWarning)
        yield


# --- H: clipping and logging ----------------------------------------------------------


class Net(torch.nn.Sequential):
    """A small net and its loss on random batches."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def loss(self):
        inputs = torch.randn(32, 8)
        with torch.autocast("cpu", torch.float16):
            outputs = self(inputs)
        return (outputs - inputs.sum(1, keepdim=True)).square().mean()


def divide_by_scale(net, scaler):
    for param in net.parameters():
        param.grad /= scaler.get_scale()


WRITES = {
    "clip_norm": ("GS112", lambda net, _: clip_grad_norm_(net.parameters(), 1.0)),
    "clip_value": ("GS112", lambda net, _: clip_grad_value_(net.parameters(), 0.5)),
    "clip_each": (
        "GS112",
        lambda net, _: [clip_grad_norm_([param], 0.1) for param in net.parameters()],
    ),
    "unscaled_by_hand": ("GS113", divide_by_scale),
}


def train(net, scaler, write, steps=1, *, clips=False):
    optimizer = SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(net.loss()).backward()
        write(net, scaler)
        if clips:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("name", ["clip_norm", "clip_value", "unscaled_by_hand"])
def test_writes_to_scaled_gradients_are_reported_at_the_first_step(name, clips):
    (code, write), net = WRITES[name], Net()
    with pytest.warns(GradscaleWarning) as caught:
        train(net, scaler_of(net), write, clips=clips)
    assert [warning.message.code for warning in caught] == [code]
    assert [warning.filename for warning in caught] == [__file__]
    net = Net()
    before = [param.clone() for param in net.parameters()]
    with pytest.raises(OrderError) as error:
        train(net, scaler_of(net, guard="raise"), write, clips=clips)
    assert error.value.code == code
    assert all(map(torch.equal, before, net.parameters()))


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.filterwarnings("ignore::gradscale.GradscaleWarning")
def test_writes_to_scaled_gradients_are_found_in_the_first_steps(name, caplog):
    (code, write), net = WRITES[name], Net()
    scaler = scaler_of(net)
    train(net, scaler, write, steps=8)
    scaler.close()
    assert code in caplog.text


def add_noise(net, _):
    for param in net.parameters():
        param.grad += 0.01 * torch.randn_like(param.grad)


def average(net, _):
    for param in net.parameters():
        param.grad /= 2


def clip_scaled(net, scaler):
    clip_grad_norm_(net.parameters(), 0.3 * scaler.get_scale())


@pytest.mark.parametrize("write", [add_noise, average, clip_scaled])
def test_other_writes_are_not_reported(write, coded):
    net = Net()
    train(net, scaler_of(net), write)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("by", ["torch", "gradscale"])
def test_a_clip_after_unscale_clips_the_true_norm(fused, by, coded):
    param = parameter(2)
    optimizer, scaler = SGD([param], lr=1.0, fused=fused), scaler_of()
    scaler.scale(planted(param, 3.0)).backward()
    if by == "torch":
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_([param], 1.0)
    else:
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert norm.item() == pytest.approx(3.0 * math.sqrt(2.0))
    assert param.tolist() == pytest.approx([-math.sqrt(0.5)] * 2)


def test_a_clip_to_a_scaled_norm_is_right(coded):
    param = parameter(2)
    optimizer, scaler = SGD([param], lr=1.0), scaler_of()
    scaler.scale(planted(param, 3.0)).backward()
    clip_grad_norm_([param], 1.0 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == pytest.approx([-math.sqrt(0.5)] * 2)


@kinds
def test_the_norm_to_log_is_that_of_unscaled_gradients(make, coded):
    param = parameter(4)
    optimizer, scaler = make([param], lr=1.0), scaler_of()
    scaler.scale(planted(param, 0.5)).backward()
    assert param.grad.norm().item() == SCALE
    # A limit that no norm reaches: for the figure alone.
    norm = scaler.clip_grad_norm_(optimizer, math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert norm.item() == scaler.last.grad_norm == 1.0


def test_the_norm_of_float16_gradients_does_not_overflow(coded):
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(planted(param, 5000.0)).backward()
    # 5000 squared is not a float16.
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert norm.item() == pytest.approx(5000.0 * math.sqrt(2.0))
    assert scaler.last.applied


@kinds
def test_growth_does_not_change_the_gradient_of_its_step(make, coded):
    found = {}
    for interval in (1, 1000):
        param = parameter(2)
        optimizer = make([param], lr=0.5)
        scaler = scaler_of(growth_interval=interval)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(planted(param, 0.75)).backward()
            scaler.step(optimizer)
            scaler.update()
        found[interval] = param.tolist(), scaler.get_scale()
    assert found[1][0] == found[1000][0]
    assert (found[1][1], found[1000][1]) == (16 * SCALE, SCALE)


# --- L: silent damage -----------------------------------------------------------------


def train_batch_norm(bad, **settings):
    torch.manual_seed(0)
    model = torch.nn.BatchNorm1d(2)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = scaler_of(model, **settings)
    inputs = torch.randn(8, 2)
    inputs[0] = bad
    before = {name: value.clone() for name, value in model.named_buffers()}
    scaler.scale(model(inputs).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    return before, dict(model.named_buffers())


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_skipped_step_leaves_the_statistics_of_batch_norm_alone(bad):
    before, after = train_batch_norm(bad, guard_buffers=True)
    assert all(torch.equal(before[name], after[name]) for name in before)
    _, damaged = train_batch_norm(bad)
    assert not damaged["running_mean"].isfinite().all()


@kinds
@pytest.mark.parametrize("bad", [INF, NAN, -INF])
def test_no_optimizer_lets_one_bad_element_through(make, bad):
    param, other = parameter(3), parameter(2)
    optimizer, scaler = make([param, other], lr=1.0), scaler_of()
    loss = planted(param, torch.tensor([1.0, bad, 1.0])) + planted(other, 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (param.tolist(), other.tolist()) == ([0.0] * 3, [0.0] * 2)
    assert not scaler.last.applied
    assert int(scaler.skipped_steps) == 1


def test_a_loss_that_is_not_finite_is_counted_whatever_the_log_shows():
    param = parameter(1)
    optimizer, scaler = SGD([param], lr=1.0), scaler_of()
    scaler.scale(param.sum() * NAN).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.verdict is Verdict.FORWARD_NONFINITE
    assert not scaler.last.applied


@kinds
def test_a_bad_gradient_does_not_live_on_in_a_loop_that_never_clears(make):
    param = parameter(2)
    optimizer, scaler = make([param], lr=1.0), scaler_of(on_skip="clear")
    for grad in (INF, 1.0):
        scaler.scale(planted(param, grad)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (int(scaler.applied_steps), int(scaler.skipped_steps)) == (1, 1)
    assert param.isfinite().all()
    assert param.tolist() != [0.0, 0.0]


def test_a_scheduler_can_follow_the_applied_steps():
    param = parameter(1)
    optimizer, scaler = SGD([param], lr=1.0), scaler_of()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for grad in (1.0, INF, 1.0):
        optimizer.zero_grad()
        scaler.scale(planted(param, grad)).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.last.applied:
            scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


# --- O: several losses, GANs, closures ------------------------------------------------


def misuse_unscaled_second_loss(scaler, param, optimizer):
    scaler.scale(planted(param, 1.0)).backward()
    planted(param, 1.0).backward()
    scaler.step(optimizer)


def misuse_unscaled_first_loss(scaler, param, optimizer):
    loss = planted(param, 1.0)
    scaler.scale(loss)
    loss.backward()
    scaler.unscale_(optimizer)


def misuse_unscaled_loss_then_clip(scaler, param, optimizer):
    loss = planted(param, 1.0)
    scaler.scale(loss)
    loss.backward()
    scaler.clip_grad_norm_(optimizer, 1.0)


def misuse_second_scaler(scaler, param, optimizer):
    scaler.scale(planted(param, 1.0)).backward()
    GradScaler("cpu", init_scale=4 * SCALE).scale(planted(param, 1.0)).backward()
    scaler.step(optimizer)


def misuse_unscaled_in_block(scaler, param, optimizer):
    loss = planted(param, 1.0)
    with scaler.loss(loss, id=1):
        loss.backward()


def misuse_backward_after_block(scaler, param, optimizer):
    with scaler.loss(planted(param, 1.0), id=1) as scaled:
        pass
    scaled.backward()
    scaler.step(optimizer)


def misuse_block_after_unscale(scaler, param, optimizer):
    scaler.scale(planted(param, 1.0)).backward()
    scaler.unscale_(optimizer)
    with scaler.loss(planted(param, 1.0), id=1) as scaled:
        scaled.backward()


MIXTURES = {
    misuse_unscaled_second_loss: "GS114",
    misuse_unscaled_first_loss: "GS114",
    misuse_unscaled_loss_then_clip: "GS114",
    misuse_second_scaler: "GS114",
    misuse_unscaled_in_block: "GS114",
    misuse_backward_after_block: "GS114",
    misuse_block_after_unscale: "GS104",
}
name_of = {"ids": lambda value: getattr(value, "__name__", value)}


@pytest.mark.parametrize(("misuse", "code"), MIXTURES.items(), **name_of)
def test_a_sum_of_two_scales_is_reported_once(misuse, code):
    param = parameter(2)
    with pytest.warns(GradscaleWarning) as caught:
        misuse(scaler_of(), param, SGD([param], lr=1.0))
    assert [warning.message.code for warning in caught] == [code]
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(("misuse", "code"), MIXTURES.items(), **name_of)
def test_a_sum_of_two_scales_is_an_error_with_guard_raise(misuse, code):
    param = parameter(2)
    with pytest.raises(OrderError) as error:
        misuse(scaler_of(guard="raise"), param, SGD([param], lr=1.0))
    assert error.value.code == code
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_foreign_backward_that_was_cleared_is_not_reported(set_to_none, coded):
    param = parameter(2)
    optimizer, scaler = SGD([param], lr=1.0), scaler_of()
    scaler.scale(planted(param, 5.0)).backward()
    planted(param, 1.0).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    scaler.scale(planted(param, 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-1.0, -1.0]


def test_two_scalers_of_a_gan_are_not_reported(coded):
    torch.manual_seed(0)
    maker, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    both = [(model, SGD(model.parameters(), lr=0.1)) for model in (maker, critic)]
    scalers = [GradScaler("cpu", init_scale=2.0**n) for n in (8, 12)]
    for _ in range(3):
        both[1][1].zero_grad()
        fake = maker(torch.randn(4, 2))
        scalers[1].scale(critic(fake.detach()).mean()).backward()
        scalers[1].step(both[1][1])
        scalers[1].update()
        both[0][1].zero_grad()
        # Gives the critic gradients too, which its zero_grad() clears.
        scalers[0].scale(-critic(fake).mean()).backward()
        scalers[0].step(both[0][1])
        scalers[0].update()
    assert all(int(scaler.applied_steps) == 3 for scaler in scalers)


def test_gradients_of_any_kind_are_checked_without_an_error(coded):
    params = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        for shape, dtype in (
            ((0, 3), torch.float32),
            ((), torch.float64),
            ((2,), torch.complex64),
            ((2,), torch.bfloat16),
        )
    ]
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer, scaler = SGD([*params, embedding.weight], lr=1.0), scaler_of()
    for _ in range(10):
        optimizer.zero_grad()
        loss = sum(param.abs().float().sum() for param in params)
        loss = loss + embedding(torch.tensor([1, 1])).sum()
        scaler.scale(loss).backward()
        for param in params:
            param.grad *= 0.5
        scaler.step(optimizer)
        scaler.update()
    assert int(scaler.applied_steps) == 10


def test_the_hooks_are_gone_after_the_first_update():
    param = parameter(2)
    optimizer, scaler = SGD([param], lr=1.0), scaler_of()
    scaler.scale(planted(param, 1.0)).backward()
    watched = scaler._iteration.first_backwards
    assert watched._hooks
    scaler.step(optimizer)
    scaler.update()
    planted(param, 1.0).backward()
    assert (watched._hooks, watched.among([param])) == ({}, [])


def call_in_block(call, param, optimizer, scaler):
    with scaler.loss(planted(param, 1.0), id=1) as scaled:
        scaled.backward()
        call(scaler, param, optimizer)


IN_BLOCK = {
    "step": lambda scaler, param, optimizer: scaler.step(optimizer),
    "unscale_": lambda scaler, param, optimizer: scaler.unscale_(optimizer),
    "update": lambda scaler, param, optimizer: scaler.update(),
    "clip_grad_norm_": lambda scaler, param, optimizer: scaler.clip_grad_norm_(
        optimizer, 1.0
    ),
    "scale": lambda scaler, param, optimizer: scaler.scale(planted(param, 1.0)),
    "loss": lambda scaler, param, optimizer: scaler.loss(
        planted(param, 1.0), id=2
    ).__enter__(),
}


@pytest.mark.parametrize("name", IN_BLOCK)
def test_only_backward_belongs_into_the_block_of_a_loss(name):
    param = parameter(2)
    with pytest.raises(OrderError, match=rf"{name}\(\) was called inside") as error:
        call_in_block(IN_BLOCK[name], param, SGD([param], lr=1.0), scaler_of())
    assert error.value.code == "GS102"


def test_a_block_that_fails_is_left_for_the_next_one():
    param = parameter(2)
    optimizer, scaler = SGD([param], lr=1.0), scaler_of()
    with pytest.raises(OrderError):
        call_in_block(IN_BLOCK["scale"], param, optimizer, scaler)
    with scaler.loss(planted(param, 1.0), id=1) as scaled:
        scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("call", ["scale", "loss"])
@pytest.mark.parametrize("guard", ["report", "raise"])
def test_a_loss_that_is_scaled_twice_is_reported(call, guard):
    param = parameter(2)
    scaler = scaler_of(guard=guard)
    scaled = scaler.scale(planted(param, 1.0))
    assert is_scaled(scaled)
    # As in torch, a report does not end the run.
    found = pytest.raises(OrderError, match=r"already scaled.*GS102")
    if guard == "report":
        found = pytest.warns(GradscaleWarning, match=r"already scaled.*GS102")
    with found:
        if call == "scale":
            scaler.scale(scaled)
        else:
            scaler.loss(scaled).__enter__()


def test_an_optimizer_that_needs_a_closure_is_pointed_to_it():
    param = parameter(2)
    optimizer, scaler = torch.optim.LBFGS([param]), scaler_of()
    scaler.scale(planted(param, 1.0)).backward()
    with pytest.raises(OrderError, match="step_with_closure") as error:
        scaler.step(optimizer)
    assert error.value.code == "GS108"


@pytest.mark.parametrize("returns", ["nothing", "the scaled loss"])
def test_a_closure_returns_the_loss_before_scaling(returns):
    param = parameter(2)
    optimizer, scaler = torch.optim.LBFGS([param]), scaler_of()

    def closure():
        optimizer.zero_grad()
        scaled = scaler.scale((param - 1.0).square().sum())
        scaled.backward()
        return None if returns == "nothing" else scaled

    with pytest.raises(OrderError, match=f"returned {returns}") as error:
        step_with_closure(scaler, optimizer, closure)
    assert error.value.code == "GS108"
    assert param.tolist() == [0.0, 0.0]


def test_a_closure_without_scale_is_refused():
    param = parameter(2)
    optimizer, scaler = torch.optim.LBFGS([param]), scaler_of()

    def closure():
        optimizer.zero_grad()
        loss = (param - 1.0).square().sum()
        loss.backward()
        return loss

    with pytest.raises(OrderError, match=r"scaler\.scale\(loss\)") as error:
        step_with_closure(scaler, optimizer, closure)
    assert error.value.code == "GS102"
    assert param.tolist() == [0.0, 0.0]


def test_a_gradient_penalty_of_unscaled_gradients_is_exact(coded):
    found = []
    for scale in (1.0, SCALE):
        param = torch.nn.Parameter(torch.tensor([0.5, -2.0]))
        optimizer = SGD([param], lr=1.0)
        scaler = GradScaler("cpu", init_scale=scale)
        loss = param.square().sum()
        [grad] = torch.autograd.grad(scaler.scale(loss), [param], create_graph=True)
        penalty = (grad / scaler.get_scale()).square().sum()
        scaler.scale(loss + penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(param.tolist())
    assert found[0] == found[1]
