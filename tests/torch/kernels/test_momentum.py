"""One pass of SGD and Lion by a kernel, against the reference and against torch."""

import pytest
import torch

from tests.torch.kernels.passes import (
    LION,
    SGD,
    all_bits,
    assert_close,
    bits,
    computed,
    copied,
    fresh_grads_,
    handed,
    launched,
    momentum_lists,
    table_for,
    three_steps,
)

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
SGD_SETTINGS = {
    "defaults": {},
    "momentum": {"momentum": 0.75},
    "nesterov": {"momentum": 0.75, "nesterov": True},
    "dampening": {"momentum": 0.75, "dampening": 0.5},
    "full dampening": {"momentum": 0.75, "dampening": 1.0},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "all": {
        "momentum": 0.75,
        "dampening": 0.25,
        "weight_decay": 0.1,
        "maximize": True,
    },
    "nesterov and decay": {"momentum": 0.75, "nesterov": True, "weight_decay": 0.1},
}
LION_SETTINGS = {
    "defaults": {},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "betas": {"beta1": 0.75, "beta2": 0.5},
    "all": {"weight_decay": 0.1, "maximize": True, "beta2": 0.75},
}
DTYPES = [(F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (F32, F16), (BF16, F32)]
dtypes = pytest.mark.parametrize(("param", "grad"), DTYPES, ids=str)


def sgd_lists(device, how, **what):
    return momentum_lists(
        device, momenta=how.momentum != 0.0, steps=how.dampening != 0.0, **what
    )


@pytest.mark.parametrize("changed", SGD_SETTINGS.values(), ids=SGD_SETTINGS)
@pytest.mark.parametrize("sizes", [(3, 1025), (5,)])
def test_sgd_gives_what_the_reference_gives(device, changed, sizes):
    how = SGD._replace(**changed)
    assert_close(*three_steps(sgd_lists(device, how, sizes=sizes), how))


@pytest.mark.parametrize("changed", LION_SETTINGS.values(), ids=LION_SETTINGS)
def test_lion_gives_what_the_reference_gives(device, changed):
    how = LION._replace(**changed)
    assert_close(*three_steps(momentum_lists(device, sizes=(3, 1025)), how))


@dtypes
@pytest.mark.parametrize("how", [SGD._replace(momentum=0.75, dampening=0.5), LION])
def test_every_dtype_gives_what_the_reference_gives(device, param, grad, how):
    lists = momentum_lists(device, param=param, grad=grad, steps=how is not LION)
    assert_close(*three_steps(lists, how._replace(weight_decay=0.1)))


@dtypes
@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("how", [SGD._replace(momentum=0.75, dampening=0.5), LION])
def test_a_skip_leaves_every_bit(device, param, grad, how, write_back):
    sizes = (3, 1025)
    lists = momentum_lists(device, sizes=sizes, param=param, grad=grad, steps=True)
    launched(lists, how, handed(device, 8.0, 0.0))
    lists.grads[1][1024] = float("inf")
    before = all_bits(lists)
    launched(lists, how, handed(device, 8.0, 1.0, write_back))
    assert all_bits(lists) == before


def test_the_first_step_that_is_taken_is_not_dampened(device):
    lists, table = momentum_lists(device, sizes=(4,), steps=True), table_for(device)
    how = SGD._replace(momentum=0.5, dampening=0.75)
    for _ in range(2):
        launched(lists, how, handed(device, 8.0, 1.0), table)
    assert lists.steps[0].item() == 0.0
    launched(lists, how, handed(device, 8.0, 0.0), table)
    assert torch.equal(lists.momenta[0], lists.grads[0] / 8.0)
    first = lists.momenta[0].clone()
    launched(lists, how, handed(device, 8.0, 0.0), table)
    torch.testing.assert_close(
        lists.momenta[0], 0.5 * first + 0.25 * first, rtol=1e-6, atol=0.0
    )
    assert lists.steps[0].item() == 2.0


def test_a_learning_rate_on_the_device_is_read_there(device):
    lists = momentum_lists(device, sizes=(3, 1025))
    rate = torch.tensor(0.5, device=device)
    for how in (SGD._replace(lr=rate, momentum=0.5), LION._replace(lr=rate)):
        assert_close(*three_steps(lists, how))
        moved, _ = three_steps(lists, how)
        rate.fill_(0.0)
        still, _ = three_steps(lists, how)
        rate.fill_(0.5)
        assert not torch.equal(moved.params[1], lists.params[1])
        assert torch.equal(still.params[1], lists.params[1])


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("grad", [F32, F16, BF16], ids=str)
def test_write_back_leaves_the_divided_gradient(device, grad, maximize):
    lists = momentum_lists(device, sizes=(3, 1025), grad=grad, momenta=False)
    ours, theirs = copied(lists), copied(lists)
    how, given = SGD._replace(maximize=maximize), handed(device, 8.0, 0.0, True)
    launched(ours, how, given)
    computed(theirs, how, given)
    assert_close(ours, theirs)
    assert torch.equal(bits(ours.grads[1]), bits(lists.grads[1] / 8.0))


def test_lion_without_beta1_goes_by_the_sign_of_the_gradient(device):
    lists, table = momentum_lists(device, sizes=(1,)), table_for(device)
    how = LION._replace(lr=0.25, beta1=0.0, beta2=0.5)
    lists.params[0].fill_(1.0)
    lists.grads[0].fill_(1.0)
    launched(lists, how, handed(device), table)
    # The momentum is 0.5 by now; 0.5 + (g - 0.5) would be 0.
    lists.grads[0].fill_(1e-9)
    launched(lists, how, handed(device), table)
    assert lists.params[0].item() == 0.5


def test_lion_stands_still_where_nothing_pulls(device):
    lists = momentum_lists(device, sizes=(1025,))
    lists.grads[0].zero_()
    before = bits(lists.params[0])
    launched(lists, LION, handed(device))
    assert torch.equal(bits(lists.params[0]), before)


@pytest.mark.parametrize("changed", SGD_SETTINGS.values(), ids=SGD_SETTINGS)
def test_twenty_steps_lead_where_torch_leads(device, changed):
    how = SGD._replace(**changed)
    lists, table = sgd_lists(device, how, sizes=(3, 70)), table_for(device)
    theirs = [torch.nn.Parameter(p.clone()) for p in lists.params]
    optimizer = torch.optim.SGD(theirs, lr=how.lr, fused=True, **changed)
    for step in range(20):
        fresh_grads_(lists, seed=step)
        for param, grad in zip(theirs, lists.grads, strict=True):
            param.grad = grad / 8.0
        optimizer.step()
        launched(lists, how, handed(device, 8.0, 0.0), table)
    for mine, other in zip(lists.params, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=0.0, atol=20 * 2.0**-22)
