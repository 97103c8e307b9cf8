"""Steps that torch's fused optimizers take back, by one launch, as torch does it."""

import copy
import math
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale.torch import GradScaler
from gradscale.torch.kernels import counting, taking_back
from gradscale.torch.kernels.taking_back import ONE_LAUNCH, SkipFlag, StepCounts

MANY = ONE_LAUNCH + 6
SKIPPED = (0, 3, 4)
OPTIMIZERS = [torch.optim.Adam, torch.optim.AdamW]


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def optimizer_of(kind, device, sizes=(MANY,)):
    """Return a fused optimizer with a group of so many parameters for each size."""
    torch.manual_seed(0)
    groups = [
        {
            "params": [
                torch.nn.Parameter(torch.randn(2, device=device)) for _ in range(n)
            ]
        }
        for n in sizes
    ]
    return kind(groups, lr=0.1, fused=True)


def trained(optimizer, device, counts, steps=7):
    """Step with and without a skip; return the names of the operators that ran."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    torch.manual_seed(1)
    with Operators() as operators:
        for step in range(steps):
            for param in params:
                param.grad = torch.randn(2, device=device)
            flag = torch.tensor(float(step in SKIPPED), device=device)
            optimizer.grad_scale = torch.tensor(4.0, device=device)
            optimizer.found_inf = flag if counts is None else counts(optimizer, flag)
            optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf
    return operators.seen


def all_of(optimizer):
    """Return the weights and the state, as one list of tensors."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [*params, *(v for p in params for v in optimizer.state[p].values())]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("sizes", [(MANY,), (MANY, MANY + 3, 2), (400,)], ids=str)
def test_weights_and_state_are_torchs_bit_by_bit(device, kind, sizes):
    ours, torchs = (optimizer_of(kind, device, sizes) for _ in range(2))
    trained(torchs, device, None)
    trained(ours, device, StepCounts("triton").flag)
    for mine, other in zip(all_of(ours), all_of(torchs), strict=True):
        assert torch.equal(mine, other)
    assert ours.state[ours.param_groups[0]["params"][0]]["step"] == 7 - len(SKIPPED)


def test_torch_is_not_asked_to_take_back_what_was_taken_back(device):
    optimizer = optimizer_of(torch.optim.AdamW, device, (MANY, MANY))
    seen = trained(optimizer, device, StepCounts("triton").flag)
    assert "_foreach_sub_" not in seen
    assert seen["_fused_adamw_"] == 14


def test_addresses_are_sent_once_for_each_group(device):
    optimizer = optimizer_of(torch.optim.AdamW, device, (MANY, MANY))
    counts = StepCounts("triton")
    trained(optimizer, device, counts.flag)
    sent = [pointers for _, pointers in counts._kept.values()]
    trained(optimizer, device, counts.flag)
    assert len(sent) == 2
    assert all(
        one is other
        for one, (_, other) in zip(sent, counts._kept.values(), strict=True)
    )


def test_few_counts_are_left_to_torch(device):
    optimizer = optimizer_of(torch.optim.AdamW, device, (ONE_LAUNCH,))
    seen = trained(optimizer, device, StepCounts("triton").flag)
    assert seen["_foreach_sub_"] == 7


def test_counts_of_another_dtype_are_left_to_torch(device):
    steps = [torch.tensor(3.0, dtype=torch.float64, device=device)] * MANY
    assert not StepCounts("triton").take_back_(steps, torch.ones((), device=device))


def test_a_state_that_is_loaded_is_counted_from(device):
    kind, counts = torch.optim.AdamW, StepCounts("triton")
    ours, torchs = optimizer_of(kind, device), optimizer_of(kind, device)
    trained(ours, device, counts.flag)
    kept = copy.deepcopy(ours.state_dict())
    trained(ours, device, counts.flag)
    ours.load_state_dict(copy.deepcopy(kept))
    torchs.load_state_dict(copy.deepcopy(kept))
    with torch.no_grad():
        for mine, other in zip(all_of(ours), all_of(torchs), strict=True):
            other.copy_(mine)
    trained(ours, device, counts.flag)
    trained(torchs, device, None)
    for mine, other in zip(all_of(ours), all_of(torchs), strict=True):
        assert torch.equal(mine, other)


def test_no_more_lists_are_kept_than_needed(device, monkeypatch):
    monkeypatch.setattr(taking_back, "KEPT", 2)
    counts = StepCounts("triton")
    for _ in range(5):
        optimizer = optimizer_of(torch.optim.AdamW, device)
        trained(optimizer, device, counts.flag)
        assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 4
    assert len(counts._kept) <= 2


# --- the flag itself ------------------------------------------------------------------


def test_a_flag_is_a_plain_tensor_in_all_other_calls(device):
    plain = torch.tensor(1.0, device=device)
    optimizer = optimizer_of(torch.optim.AdamW, device)
    flag = StepCounts("triton").flag(optimizer, plain)
    assert type(flag) is SkipFlag
    assert flag.data_ptr() == plain.data_ptr()
    assert flag.to(device, non_blocking=True) is flag
    assert type(flag + 1.0) is type(1.0 - flag) is type(flag.clone()) is torch.Tensor
    assert (flag + 1.0).item() == 2.0
    counts = [torch.tensor(5.0, device=device) for _ in range(MANY)]
    torch._foreach_sub_(counts, [flag, *[plain] * (MANY - 1)])
    torch._foreach_sub_(counts, 1.0)
    torch._foreach_sub_(counts[:2], [flag, flag])
    assert [count.item() for count in counts[:3]] == [2.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", ["sgd", "own", "derived"])
def test_other_optimizers_get_the_plain_flag(device, kind):
    class Derived(torch.optim.AdamW):
        """What it does with a flag is not known."""

    make = {"sgd": torch.optim.SGD, "derived": Derived, "own": torch.optim.RMSprop}
    optimizer = make[kind]([torch.nn.Parameter(torch.ones(1, device=device))], lr=0.1)
    flag = torch.tensor(1.0, device=device)
    assert StepCounts("triton").flag(optimizer, flag) is flag


def test_plain_operations_get_the_plain_flag(device):
    flag = torch.tensor(1.0, device=device)
    optimizer = optimizer_of(torch.optim.AdamW, device)
    assert StepCounts("plain").flag(optimizer, flag) is flag


# --- in a scaler ----------------------------------------------------------------------


def run(device, kernels, steps=8):
    """Train with a scaler through an overflow; return all of the optimizer."""
    optimizer = optimizer_of(torch.optim.AdamW, device)
    params = optimizer.param_groups[0]["params"]
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
    return all_of(optimizer), scales


def test_a_scaler_steps_as_by_plain_operations(device):
    ours, scales = run(device, "triton")
    plain, plain_scales = run(device, "plain")
    assert scales == plain_scales
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_a_kernel_that_fails_leaves_it_to_torch(device, monkeypatch):
    def broken(*args, **constants):
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(counting, "_take_back", broken)
    monkeypatch.setattr("gradscale.torch.kernels._broken", None)
    monkeypatch.setattr(taking_back, "usable", lambda kernels, device: True)
    ours, torchs = (optimizer_of(torch.optim.AdamW, device) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(ours, device, StepCounts("auto").flag)
    assert [w.message.code for w in caught if hasattr(w.message, "code")] == ["GS110"]
    trained(torchs, device, None)
    for mine, other in zip(all_of(ours), all_of(torchs), strict=True):
        assert torch.equal(mine, other)
