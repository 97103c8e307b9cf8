"""What stands in for torch's fused kernel, from step to step and in a scaler."""

import copy
import math
import weakref

import pytest
import torch

from gradscale.torch import GradScaler
from gradscale.torch.kernels import pointer_table as tables
from gradscale.torch.kernels.args import AdamConfig
from gradscale.torch.kernels.torch_fused_adam import StandIn
from tests.torch.kernels.stood_in import (
    ADAMW,
    SIZES,
    SKIPPED,
    all_of,
    assert_same,
    optimizer_of,
    params_of,
    stepped,
    trained,
)

pytestmark = pytest.mark.usefixtures("few_are_many")


def test_a_state_that_is_loaded_is_gone_on_from(device):
    stand_in = StandIn("triton")
    ours, torchs = optimizer_of(ADAMW, device), optimizer_of(ADAMW, device)
    stepped(ours, stand_in)
    kept = copy.deepcopy(ours.state_dict())
    weights = [p.detach().clone() for p in params_of(ours)]
    stepped(ours, stand_in)
    for optimizer in (ours, torchs):
        optimizer.load_state_dict(copy.deepcopy(kept))
        with torch.no_grad():
            for param, weight in zip(params_of(optimizer), weights, strict=True):
                param.copy_(weight)
    stepped(ours, stand_in)
    trained(torchs, None)
    assert_same(ours, torchs)


def test_a_group_that_is_added_is_stepped(device):
    stand_in = StandIn("triton")
    ours, torchs = optimizer_of(ADAMW, device), optimizer_of(ADAMW, device)
    for optimizer, who in ((ours, stand_in), (torchs, None)):
        trained(optimizer, who)
        optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(9, device=device))]}
        )
        trained(optimizer, who)
    assert_same(ours, torchs)


def test_gradients_are_not_kept_alive(device):
    optimizer = optimizer_of(ADAMW, device)
    stand_in = StandIn("triton")
    stepped(optimizer, stand_in)
    grads = [weakref.ref(param.grad) for param in params_of(optimizer)]
    optimizer.zero_grad(set_to_none=True)
    assert [grad() for grad in grads] == [None] * len(SIZES)


def replaced(optimizer, place):
    """Put a longer parameter and state in the place of one; return what is gone."""
    group = optimizer.param_groups[0]
    old = group["params"][place]
    state = optimizer.state.pop(old)
    new = torch.nn.Parameter(torch.cat([old.detach(), old.detach()]))
    group["params"][place] = new
    optimizer.state[new] = {
        name: value if value.dim() == 0 else torch.cat([value, value])
        for name, value in state.items()
    }
    return [weakref.ref(one) for one in (old, state["exp_avg"], state["exp_avg_sq"])]


@pytest.mark.parametrize("place", [0, 1])
def test_parameters_that_are_replaced_are_let_go(device, place):
    ours, torchs = optimizer_of(ADAMW, device), optimizer_of(ADAMW, device)
    stand_in, gone = StandIn("triton"), []
    for _ in range(4):
        stepped(ours, stand_in, steps=2)
        trained(torchs, None, steps=2)
        gone += replaced(ours, place)
        replaced(torchs, place)
    assert [ref() for ref in gone] == [None] * len(gone)
    stepped(ours, stand_in)
    trained(torchs, None)
    assert_same(ours, torchs)
    assert len(stand_in._groups) == 1


@pytest.mark.parametrize("groups", [1, 70])
def test_tables_are_sent_once_however_many_groups(device, monkeypatch, groups):
    sent, send = [], tables.Staging.send
    monkeypatch.setattr(
        tables.Staging, "send", lambda *a, **k: (sent.append(1), send(*a, **k))
    )
    optimizer = optimizer_of(ADAMW, device, sizes=[(2, 3)] * groups)
    stand_in = StandIn("triton")
    grads = [torch.ones_like(param) for param in params_of(optimizer)]
    flag = torch.zeros((), device=device)
    for _ in range(3):
        for param, grad in zip(params_of(optimizer), grads, strict=True):
            param.grad = grad
        optimizer.grad_scale = None
        optimizer.found_inf = stand_in.flag(optimizer, flag)
        optimizer.step()
    assert len(sent) == groups


def test_betas_may_change_in_each_step(device):
    stand_in = StandIn("triton")
    ours, torchs = optimizer_of(ADAMW, device), optimizer_of(ADAMW, device)
    for step in range(4):
        for optimizer, who in ((ours, stand_in), (torchs, None)):
            optimizer.param_groups[0]["betas"] = (0.5 + step / 10, 0.99)
            trained(optimizer, who, steps=2)
    assert_same(ours, torchs)


def test_other_strides_at_the_same_address_are_noticed(device):
    def made():
        torch.manual_seed(0)
        return ADAMW([torch.nn.Parameter(torch.randn(3, 4, device=device))], fused=True)

    ours, torchs = made(), made()
    for optimizer, who in ((ours, StandIn("triton")), (torchs, None)):
        trained(optimizer, who, steps=2)
        (param,) = params_of(optimizer)
        # As channels_last: the state and the gradients follow.
        param.data = param.data.t().contiguous().t()
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[param][name] = torch.zeros_like(param)
        trained(optimizer, who)
    assert_same(ours, torchs)


def test_a_gradient_of_another_layout_is_left_to_torch(device):
    optimizer, stand_in = optimizer_of(ADAMW, device, sizes=((6,),)), StandIn("triton")
    param = torch.nn.Parameter(torch.ones(2, 3, device=device))
    lists = [[param], [torch.ones(3, 2, device=device).t()]]
    lists += [[torch.zeros_like(param)], [torch.zeros_like(param)], []]
    lists += [[torch.ones((), device=device)]]
    flag = stand_in.flag(optimizer, torch.zeros((), device=device))
    how = AdamConfig(0.1, 0.9, 0.99, 1e-8, 0.0, decoupled=True, maximize=False)
    assert stand_in.step_(lists, how, None, flag) is None
    lists[1] = [torch.ones_like(param)]
    assert stand_in.step_(lists, how, None, flag) is not None


def test_autograd_sees_the_writes(device):
    optimizer, stand_in = optimizer_of(ADAMW, device), StandIn("triton")
    trained(optimizer, stand_in, steps=2)
    param = params_of(optimizer)[0]
    versions = param._version, param.grad._version
    optimizer.grad_scale = torch.tensor(4.0, device=device)
    optimizer.found_inf = stand_in.flag(optimizer, torch.zeros((), device=device))
    optimizer.step()
    assert param._version > versions[0]
    assert param.grad._version > versions[1]


# --- in a scaler ----------------------------------------------------------------------


def run(device, kernels, steps=8):
    """Train with a scaler through an overflow; return the optimizer and the scales."""
    optimizer = optimizer_of(ADAMW, device)
    params = params_of(optimizer)
    scaler = GradScaler(device.type, 8.0, growth_interval=3, kernels=kernels)
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params) * (math.inf if step in SKIPPED else 1)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return optimizer, scales


def test_a_scaler_steps_as_by_plain_operations(device):
    ours, scales = run(device, "triton")
    plain, plain_scales = run(device, "plain")
    assert scales == plain_scales
    mine, others = all_of(ours), all_of(plain)
    for name, value in mine.items():
        # Norms are added up in another order.
        torch.testing.assert_close(value, others[name], rtol=1e-4, atol=4e-6)


def test_a_scaler_says_who_steps(device):
    scaler = GradScaler(device.type, kernels="triton")
    words = str(scaler.path(optimizer_of(ADAMW, device)))
    assert words.startswith("fused, triton kernels")
    assert "one launch with the same bits" in words
    plain = GradScaler(device.type, kernels="plain")
    words = str(plain.path(optimizer_of(ADAMW, device)))
    assert words.startswith("fused, plain kernels")
    assert "one launch" not in words
