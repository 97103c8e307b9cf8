"""The flag that answers for torch's kernel, and the calls that it leaves to torch."""

import copy

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from gradscale.torch.kernels import torch_fused_adam as standing_in
from gradscale.torch.kernels.args import AdamConfig
from gradscale.torch.kernels.torch_fused_adam import SkipFlag, StandIn
from tests.torch.kernels.stood_in import (
    ADAMW,
    assert_same,
    optimizer_of,
    params_of,
    trained,
)

pytestmark = pytest.mark.usefixtures("few_are_many")
MANY = 5
HOW = AdamConfig(0.1, 0.9, 0.99, 1e-8, 0.0, decoupled=True, maximize=False)


def flag_of(device, value=1.0):
    """Return a flag and the plain tensor that it was made of."""
    plain = torch.tensor(value, device=device)
    return StandIn("triton").flag(optimizer_of(ADAMW, device), plain), plain


def test_a_flag_is_a_plain_tensor_in_all_other_calls(device):
    flag, plain = flag_of(device)
    assert type(flag) is SkipFlag
    assert flag.data_ptr() == plain.data_ptr()
    assert flag.to(device, non_blocking=True) is flag
    assert type(flag + 1.0) is type(1.0 - flag) is type(flag.clone()) is torch.Tensor
    assert (flag + 1.0).item() == 2.0
    counts = [torch.tensor(5.0, device=device) for _ in range(MANY)]
    torch._foreach_sub_(counts, [flag] * MANY)
    torch._foreach_sub_(counts, [flag, *[plain] * (MANY - 1)])
    torch._foreach_sub_(counts, 1.0)
    torch._foreach_sub_(counts[:2], [flag, flag])
    torch._foreach_sub_(counts, flag)
    assert [count.item() for count in counts[:3]] == [0.0, 0.0, 1.0]


class Derived(ADAMW):
    """What it does with a flag is not known."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, Derived])
def test_other_optimizers_get_the_plain_flag(device, kind):
    param = torch.nn.Parameter(torch.ones(1, device=device))
    flag = torch.tensor(1.0, device=device)
    assert StandIn("triton").flag(kind([param], lr=0.1), flag) is flag


def test_copies_of_a_flag_are_plain(device, tmp_path):
    flag, plain = flag_of(device)
    assert type(copy.deepcopy(flag)) is torch.Tensor
    assert torch.equal(copy.deepcopy(flag), plain)
    torch.save({"found": flag}, tmp_path / "hook.pt")
    found = torch.load(tmp_path / "hook.pt")["found"]
    assert type(found) is torch.Tensor
    assert torch.equal(found, plain)


def test_hooks_see_the_flag_and_may_change_it(device):
    optimizer, stand_in = optimizer_of(ADAMW, device), StandIn("triton")
    before = [param.detach().clone() for param in params_of(optimizer)]
    seen = []

    def skipped(optimizer, args, kwargs):
        seen.append(optimizer.found_inf.item())
        optimizer.found_inf.fill_(1.0)

    optimizer.register_step_pre_hook(skipped)
    trained(optimizer, stand_in, steps=2)
    assert seen == [1.0, 0.0]
    assert all(map(torch.equal, params_of(optimizer), before))
    assert {optimizer.state[p]["step"].item() for p in params_of(optimizer)} == {0.0}


def test_a_torch_that_takes_counts_back_otherwise_does_it_by_itself(device):
    optimizer, stand_in = optimizer_of(ADAMW, device, sizes=((4,),)), StandIn("triton")
    trained(optimizer, stand_in)
    (param,) = params_of(optimizer)
    state = optimizer.state[param]
    counts = [state["step"]]
    lists = [[param], [param.grad], [state["exp_avg"]], [state["exp_avg_sq"]], []]
    flag = stand_in.flag(optimizer, torch.ones((), device=device))
    before = state["step"].item()
    for take_back in (
        lambda: torch._foreach_add_(counts, [flag], alpha=-1),
        lambda: torch._foreach_sub_(list(counts), [flag]),
        lambda: torch._foreach_sub_(self=counts, other=[flag]),
        lambda: torch._foreach_sub_(counts, [flag]),
    ):
        torch._foreach_add_(counts, 1)
        assert stand_in.step_([*lists, counts], HOW, None, flag) is not None
        take_back()
        assert state["step"].item() == before


def test_plain_operations_get_the_plain_flag(device):
    flag = torch.tensor(1.0, device=device)
    assert StandIn("plain").flag(optimizer_of(ADAMW, device), flag) is flag


def left_to_torch(ours, torchs):
    """Train both to the same bits; return whether torch's own kernel ran for ours."""
    seen = trained(ours, StandIn("triton"))
    trained(torchs, None)
    assert_same(ours, torchs, exact=True)
    return seen.get("_fused_adamw_", 0) == seen.get("_foreach_sub_", 0) == 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_left_to_torch(device, dtype):
    pair = (optimizer_of(ADAMW, device, dtype=dtype) for _ in range(2))
    assert left_to_torch(*pair)


def test_a_little_is_left_to_torch(device, monkeypatch):
    monkeypatch.setattr(standing_in, "FEW", 4)
    assert left_to_torch(*(optimizer_of(ADAMW, device) for _ in range(2)))
    monkeypatch.setattr(standing_in, "LITTLE", 1000)
    seen = trained(optimizer_of(ADAMW, device), StandIn("triton"))
    assert "_fused_adamw_" not in seen


def test_a_group_with_an_empty_tensor_is_left_to_torch(device):
    pair = (optimizer_of(ADAMW, device, sizes=((3, 0, 5),)) for _ in range(2))
    assert left_to_torch(*pair)


class Named(torch.Tensor):
    """A tensor of a class of its own; nobody knows where it keeps its elements."""


def test_tensors_of_other_classes_are_left_to_torch(device):
    def made():
        optimizer = optimizer_of(ADAMW, device)
        group = optimizer.param_groups[0]
        group["params"] = [
            p.detach().as_subclass(Named).requires_grad_() for p in group["params"]
        ]
        return optimizer

    assert left_to_torch(made(), made())


def lists_of(device):
    """Return what torch hands to its kernel for two parameters."""
    shaped = [[torch.ones(4, device=device) for _ in range(2)] for _ in range(4)]
    return [*shaped, [], [torch.ones((), device=device) for _ in range(2)]]


def is_stepped(lists, device):
    """Return whether these are not left to torch."""
    flag, _ = flag_of(device, 0.0)
    return flag.stand_in.step_(lists, HOW, None, flag) is not None


def test_gradients_of_other_classes_are_left_to_torch(device):
    lists = lists_of(device)
    assert is_stepped(lists, device)
    # It has no memory: its elements lie in another tensor.
    lists[1][1] = AsyncCollectiveTensor(lists[1][1])
    assert not is_stepped(lists, device)


def test_counts_that_are_one_and_the_same_are_left_to_torch(device):
    lists = lists_of(device)
    lists[-1] = lists[-1][:1] * 2
    assert not is_stepped(lists, device)


@pytest.mark.parametrize("change", ["settings", "lists"])
def test_a_call_that_is_not_known_is_left_to_torch(device, change):
    optimizer = optimizer_of(ADAMW, device, sizes=((4,),))
    trained(optimizer, None)
    (param,) = params_of(optimizer)
    state = optimizer.state[param]
    lists = [[param.detach()], [param.grad], [state["exp_avg"]]]
    lists += [[state["exp_avg_sq"]], [], [state["step"]]]
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
    settings |= {"eps": 1e-8, "amsgrad": False, "maximize": False}
    flag, _ = flag_of(device, 0.0)
    if change == "lists":
        settings |= {"grad_scale": None, "max_exp_avg_sqs": lists.pop(4)}
        settings |= {"state_steps": lists.pop()}
    before = param.detach().clone()
    torch._fused_adamw_(*lists, **settings, found_inf=flag)
    assert not torch.equal(param, before)


def test_a_learning_rate_that_a_kernel_cannot_read_is_left_to_torch(device):
    def outcome(stand_in):
        """Return the parameters, or the error; torch for CUDA takes the first."""
        optimizer = optimizer_of(ADAMW, device)
        optimizer.param_groups[0]["lr"] = torch.tensor([0.1, 0.2], device=device)
        try:
            trained(optimizer, stand_in)
        except RuntimeError as error:
            return str(error)
        return [param.tolist() for param in params_of(optimizer)]

    assert outcome(StandIn("triton")) == outcome(None)


def test_a_compiled_step_is_right(device):
    torch._dynamo.reset()
    pair = [optimizer_of(ADAMW, device) for _ in range(2)]
    for optimizer in pair:
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    trained(pair[0], StandIn("triton"))
    trained(pair[1], None)
    assert_same(*pair, exact=False)
