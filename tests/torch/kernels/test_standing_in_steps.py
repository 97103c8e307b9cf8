"""What stands in for torch's fused kernel, from step to step and in a scaler."""

import copy
import math
import warnings
import weakref

import torch

from gradscale.torch import GradScaler
from gradscale.torch.kernels import fused_adam, standing_in
from gradscale.torch.kernels.standing_in import StandIn
from tests.torch.kernels.stood_in import (
    ADAMW,
    SIZES,
    SKIPPED,
    all_of,
    assert_same,
    optimizer_of,
    params_of,
    trained,
)


def test_a_state_that_is_loaded_is_gone_on_from(device):
    stand_in = StandIn("triton")
    ours, torchs = optimizer_of(ADAMW, device), optimizer_of(ADAMW, device)
    trained(ours, stand_in)
    kept = copy.deepcopy(ours.state_dict())
    weights = [p.detach().clone() for p in params_of(ours)]
    trained(ours, stand_in)
    for optimizer in (ours, torchs):
        optimizer.load_state_dict(copy.deepcopy(kept))
        with torch.no_grad():
            for param, weight in zip(params_of(optimizer), weights, strict=True):
                param.copy_(weight)
    trained(ours, stand_in)
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
    trained(optimizer, stand_in)
    grads = [weakref.ref(param.grad) for param in params_of(optimizer)]
    optimizer.zero_grad(set_to_none=True)
    assert [grad() for grad in grads] == [None] * len(SIZES)


def test_no_more_groups_are_kept_than_needed(device, monkeypatch):
    monkeypatch.setattr(standing_in, "KEPT", 2)
    stand_in = StandIn("triton")
    optimizer = optimizer_of(ADAMW, device, sizes=[(2,)] * 5)
    torchs = optimizer_of(ADAMW, device, sizes=[(2,)] * 5)
    for place in range(5):
        for one in (optimizer, torchs):
            one.param_groups[place]["betas"] = (0.5, 0.9 + place / 100)
    trained(optimizer, stand_in)
    trained(torchs, None)
    assert_same(optimizer, torchs)
    assert len(stand_in._groups) <= 2
    assert len(stand_in._betas) <= 2


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
    assert "one launch" in words
    assert words.startswith("fused, triton kernels")
    plain = GradScaler(device.type, kernels="plain")
    assert "PyTorch's fused kernel" in str(plain.path(optimizer_of(ADAMW, device)))


def test_a_kernel_that_fails_leaves_it_to_torch(device, monkeypatch):
    def broken(*args, **constants):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(fused_adam, "_adam", broken)
    monkeypatch.setattr("gradscale.torch.kernels._broken", None)
    monkeypatch.setattr(standing_in, "usable", lambda kernels, device: True)
    ours, torchs = optimizer_of(ADAMW, device), optimizer_of(ADAMW, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(ours, StandIn("auto"))
    assert [w.message.code for w in caught if hasattr(w.message, "code")] == ["GS110"]
    trained(torchs, None)
    assert_same(ours, torchs, exact=True)
