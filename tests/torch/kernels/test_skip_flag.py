"""The flag that answers for torch's kernel, and the calls that it leaves to torch."""

import pytest
import torch

from gradscale.torch.kernels.standing_in import SkipFlag, StandIn
from tests.torch.kernels.stood_in import (
    ADAMW,
    assert_same,
    optimizer_of,
    params_of,
    trained,
)

MANY = 5


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


@pytest.mark.parametrize("kind", ["sgd", "own", "derived"])
def test_other_optimizers_get_the_plain_flag(device, kind):
    class Derived(ADAMW):
        """What it does with a flag is not known."""

    make = {"sgd": torch.optim.SGD, "derived": Derived, "own": torch.optim.RMSprop}
    optimizer = make[kind]([torch.nn.Parameter(torch.ones(1, device=device))], lr=0.1)
    flag = torch.tensor(1.0, device=device)
    assert StandIn("triton").flag(optimizer, flag) is flag


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
