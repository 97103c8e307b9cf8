"""Passes over tensors of every layout, some of which no kernel can walk."""

import math

import pytest
import torch

from gradscale.torch.kernels import optimizer_pass as updating
from gradscale.torch.kernels.args import AdamLists
from gradscale.torch.optim import SGD as OwnSGD
from gradscale.torch.optim import AdamW, Lion
from tests.torch.kernels.passes import (
    ADAM,
    LION,
    SGD,
    adam_lists,
    all_bits,
    assert_close,
    handed,
    launched,
    momentum_lists,
    three_steps,
    values,
)

NESTEROV = SGD._replace(momentum=0.75, nesterov=True, weight_decay=0.1)


def laid(tensor, layout):
    """Return a tensor of the same values that lies otherwise in memory."""
    shape, last = tensor.shape, tensor.shape[-1]
    if layout == "gaps":
        room = tensor.new_full((*shape[:-1], 2 * last), math.nan)
        return room[..., ::2].copy_(tensor)
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "misaligned":
        room = tensor.new_full((tensor.numel() + 1,), math.nan)
        return room[1:].view(shape).copy_(tensor)
    return tensor.clone()


def lay(lists, columns, layout):
    """Return the lists with the second tensor of some columns laid otherwise."""
    changed = {
        name: [column[0], laid(column[1], layout), *column[2:]]
        for name in columns
        if (column := getattr(lists, name))
    }
    return lists._replace(**changed)


COLUMNS = {
    "all": ("params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters",
            "momenta"),
    "parameters": ("params",),
    "gradients": ("grads",),
    "moments": ("exp_avgs", "momenta"),
    "masters": ("masters",),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["gaps", "transposed", "misaligned"])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("how", [ADAM, NESTEROV, LION], ids=["adam", "sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_layout_steps_as_the_reference(device, layout, columns, how, dtype):
    make = adam_lists if how is ADAM else momentum_lists
    lists = make(device, sizes=((3,), (4, 6), (5,)), param=dtype, grad=dtype)
    known = [name for name in columns if name in lists._fields]
    ours, theirs = three_steps(lay(lists, known, layout), how)
    assert_close(ours, theirs)


def test_what_lies_around_and_between_is_not_written(device):
    lists = adam_lists(device, sizes=((3,), (4, 6), (1025,)))
    rooms = []
    for name in ("params", "grads", "exp_avgs", "exp_avg_sqs"):
        for i, tensor in enumerate(getattr(lists, name)):
            room = torch.full((tensor.numel() + 9,), 7.0, device=device)
            inside = room[5 : 5 + tensor.numel()].view(tensor.shape)
            getattr(lists, name)[i] = inside.copy_(tensor)
            rooms.append(room)
    launched(lists, ADAM, handed(device, 8.0, 0.0, True))
    assert all(room[:5].tolist() == [7.0] * 5 for room in rooms)
    assert all(room[-4:].tolist() == [7.0] * 4 for room in rooms)


def test_empty_tensors_are_passed_over_and_counted(device):
    lists = adam_lists(device, sizes=((0,), (3,), (2, 0)))
    ours, theirs = three_steps(lists, ADAM)
    assert_close(ours, theirs)
    assert [step.item() for step in ours.steps] == [3.0] * 3


def test_nothing_but_empty_tensors_is_no_trouble(device):
    ours, theirs = three_steps(adam_lists(device, sizes=((0,),)), ADAM)
    assert_close(ours, theirs)


@pytest.mark.parametrize("layout", ["gaps", "misaligned"])
def test_a_skip_leaves_every_bit_of_a_mixed_batch(device, layout):
    names = ("params", "exp_avgs")
    lists = lay(adam_lists(device, sizes=((3,), (4, 6), (0,))), names, layout)
    launched(lists, ADAM, handed(device, 8.0, 0.0))
    lists.grads[1][3, 5] = math.nan
    before = all_bits(lists)
    launched(lists, ADAM, handed(device, 8.0, 1.0, True))
    assert all_bits(lists) == before


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("how", [ADAM, NESTEROV, LION], ids=["adam", "sgd", "lion"])
def test_autograd_is_told_of_the_writes(device, how, found):
    make = adam_lists if how is ADAM else momentum_lists
    lists = lay(make(device, sizes=((3,), (4, 6))), ("params",), "gaps")
    before = [p._version for p in lists.params]
    launched(lists, how, handed(device, 8.0, found))
    assert all(p._version > old for p, old in zip(lists.params, before, strict=True))


def test_autograd_is_told_of_gradients_that_are_written(device):
    lists = adam_lists(device, sizes=((3,), (4, 6)))
    before = [g._version for g in lists.grads]
    launched(lists, ADAM, handed(device, 8.0, 0.0, True))
    assert all(g._version > old for g, old in zip(lists.grads, before, strict=True))


def test_a_backward_through_an_old_parameter_is_refused(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = AdamW([param], kernels="triton")
    loss = (param * param).sum()
    param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_f64_goes_by_the_reference(device):
    lists = adam_lists(device, sizes=((3,),))
    wide = AdamLists(*([t.double() for t in column] for column in lists))
    wide = wide._replace(steps=lists.steps)
    ours, theirs = three_steps(wide, ADAM)
    assert_close(ours, theirs)


def test_no_tensor_at_all_is_no_trouble(device):
    nothing = AdamLists([], [], [], [], [], [], [])
    assert updating.kernel_layout(nothing, "triton") is None


@pytest.mark.parametrize(
    "make",
    [
        lambda p, **how: AdamW(p, lr=0.01, **how),
        lambda p, **how: AdamW(p, lr=0.01, amsgrad=True, maximize=True, **how),
        lambda p, **how: OwnSGD(p, lr=0.01, momentum=0.75, dampening=0.5, **how),
        lambda p, **how: Lion(p, lr=0.01, weight_decay=0.1, **how),
    ],
    ids=["AdamW", "amsgrad", "SGD", "Lion"],
)
@pytest.mark.parametrize("write_back", [False, True])
def test_an_optimizer_steps_the_same_with_and_without_kernels(device, make, write_back):
    ends = []
    for kernels in ("triton", "plain"):
        first, second = values(((40, 30), (2, 3, 4, 5)), device)
        half = values(((7,),), device, seed=5)[0].half()
        second = second.contiguous(memory_format=torch.channels_last)
        params = [torch.nn.Parameter(p) for p in (first, second, half)]
        optimizer = make(params, kernels=kernels, write_back=write_back)
        for step in range(4):
            shapes = [p.shape for p in params]
            for param, grad in zip(
                params, values(shapes, device, seed=step), strict=True
            ):
                # As backward lays them: like their parameter.
                param.grad = torch.empty_like(param).copy_(8.0 * grad)
            optimizer.grad_scale = torch.tensor(8.0, device=device)
            optimizer.found_inf = torch.tensor(float(step == 1), device=device)
            optimizer.step()
        grads = [p.grad.clone() for p in params]
        ends.append((params, grads, optimizer.state_dict()["state"]))
    for mine, other in zip(ends[0][0], ends[1][0], strict=True):
        rtol = 2.0**-10 if mine.dtype is torch.float16 else 1e-5
        torch.testing.assert_close(mine, other, rtol=rtol, atol=1e-6)
    for mine, other in zip(ends[0][1], ends[1][1], strict=True):
        assert torch.equal(mine, other)
    assert ends[0][2].keys() == ends[1][2].keys()
    for key, state in ends[0][2].items():
        assert state.keys() == ends[1][2][key].keys()
