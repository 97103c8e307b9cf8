"""One pass of Adam and AdamW by a kernel, against the reference and against torch."""

import pytest
import torch

from tests.torch.kernels.passes import (
    ADAM,
    adam_lists,
    all_bits,
    assert_close,
    bits,
    computed,
    copied,
    fresh_grads_,
    handed,
    launched,
    table_for,
    three_steps,
)

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
SETTINGS = {
    "defaults": {},
    "adam": {"decoupled": False},
    "decoupled decay": {"weight_decay": 0.1},
    "coupled decay": {"weight_decay": 0.1, "decoupled": False},
    "maximize": {"maximize": True},
    "coupled and maximize": {
        "weight_decay": 0.1,
        "decoupled": False,
        "maximize": True,
    },
    "betas": {"beta1": 0.5, "beta2": 0.75},
    "eps": {"eps": 0.5},
    "beta2 0": {"beta2": 0.0},
    "lr 0": {"lr": 0.0},
}
DTYPES = [(F32, F32), (F16, F16), (BF16, BF16), (F16, F32), (F32, F16), (BF16, F32)]
dtypes = pytest.mark.parametrize(("param", "grad"), DTYPES, ids=str)


@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_every_setting_gives_what_the_reference_gives(device, how, amsgrad):
    lists = adam_lists(device, sizes=(3, 1025), amsgrad=amsgrad)
    assert_close(*three_steps(lists, ADAM._replace(**how)))


@dtypes
def test_every_dtype_gives_what_the_reference_gives(device, param, grad):
    lists = adam_lists(device, param=param, grad=grad, amsgrad=True)
    assert_close(*three_steps(lists, ADAM._replace(weight_decay=0.1)))


@pytest.mark.parametrize("param", [F16, BF16], ids=str)
def test_a_half_parameter_is_its_master_rounded(device, param):
    ours, _ = three_steps(adam_lists(device, param=param, grad=param), ADAM)
    step = torch.finfo(param).eps
    for half, master in zip(ours.params, ours.masters, strict=True):
        if device.type == "cuda" or param is F16:
            assert torch.equal(half, master.to(param))
        else:
            # The interpreter cuts off where a GPU rounds.
            torch.testing.assert_close(half.float(), master, rtol=step, atol=0.0)


@pytest.mark.parametrize("scale", [None, 1.0, 3.0, 2.0**-24, 2.0**100])
def test_gradients_are_divided_by_any_scale(device, scale):
    lists = adam_lists(device, sizes=(3, 1025))
    assert_close(*three_steps(lists, ADAM, scale))


def test_a_learning_rate_on_the_device_is_read_there(device):
    lists = adam_lists(device, sizes=(3, 1025))
    rate = torch.tensor(0.05, device=device)
    how = ADAM._replace(lr=rate, weight_decay=0.1)
    assert_close(*three_steps(lists, how))
    ours, _ = three_steps(lists, how)
    rate.fill_(0.0)
    still, _ = three_steps(lists, how)
    assert not torch.equal(ours.params[0], lists.params[0])
    assert torch.equal(still.params[0], lists.params[0])


@dtypes
@pytest.mark.parametrize("write_back", [False, True])
def test_a_skip_leaves_every_bit(device, param, grad, write_back):
    lists = adam_lists(device, sizes=(3, 1025), param=param, grad=grad, amsgrad=True)
    launched(lists, ADAM, handed(device, 8.0, 0.0))
    lists.grads[1][1024] = float("nan")
    before = all_bits(lists)
    launched(lists, ADAM, handed(device, 8.0, 1.0, write_back))
    assert all_bits(lists) == before


def test_each_tensor_has_a_count_of_its_own(device):
    lists = adam_lists(device, sizes=(3, 5, 4))
    lists.steps[0].fill_(0.0)
    lists.steps[1].fill_(7.0)
    lists.steps[2].fill_(1e6)
    ours, theirs = three_steps(lists, ADAM)
    assert_close(ours, theirs)
    assert [step.item() for step in ours.steps] == [3.0, 10.0, 1e6 + 3.0]


@pytest.mark.parametrize("count", [1, 257])
def test_any_number_of_counts_goes_up_by_one(device, count):
    lists = adam_lists(device, sizes=(1,) * count)
    launched(lists, ADAM, handed(device))
    assert [step.item() for step in lists.steps] == [1.0] * count


@dtypes
@pytest.mark.parametrize("maximize", [False, True])
def test_write_back_leaves_the_divided_gradient(device, param, grad, maximize):
    lists = adam_lists(device, sizes=(3, 1025), param=param, grad=grad)
    ours, theirs = copied(lists), copied(lists)
    how, given = ADAM._replace(maximize=maximize), handed(device, 8.0, 0.0, True)
    launched(ours, how, given)
    computed(theirs, how, given)
    # A power of two: the division is exact.
    assert_close(ours, theirs)
    assert torch.equal(bits(ours.grads[1]), bits(lists.grads[1] / 8.0))


def test_the_division_is_rounded_once(device):
    lists = adam_lists(device, sizes=(1025,))
    # By a tensor: torch takes a number for its inverse on CUDA.
    expected = lists.grads[0] / torch.full_like(lists.grads[0], 3.0)
    # Times 1 / 3, every third element would be one ulp off.
    launched(lists, ADAM, handed(device, 3.0, 0.0, True))
    assert torch.equal(bits(lists.grads[0]), bits(expected))


def test_write_back_without_a_scale_writes_nothing(device):
    lists = adam_lists(device, sizes=(3,))
    before = lists.grads[0]._version
    launched(lists, ADAM, handed(device, None, 0.0, True))
    assert lists.grads[0]._version == before


def test_without_write_back_the_gradients_stay(device):
    lists = adam_lists(device)
    before = [bits(g) for g in lists.grads]
    versions = [g._version for g in lists.grads]
    launched(lists, ADAM, handed(device, 8.0, 0.0))
    assert all(
        torch.equal(bits(g), b) for g, b in zip(lists.grads, before, strict=True)
    )
    assert [g._version for g in lists.grads] == versions


def test_without_a_first_moment_the_average_is_the_gradient(device):
    lists, table = adam_lists(device, sizes=(1,)), table_for(device)
    how = ADAM._replace(beta1=0.0)
    lists.grads[0].fill_(1.0)
    launched(lists, how, handed(device), table)
    # m + 1 * (g - m) would be 0 here.
    lists.grads[0].fill_(1e-9)
    launched(lists, how, handed(device), table)
    assert lists.exp_avgs[0].item() == lists.grads[0].item()


@pytest.mark.parametrize("size", [1e-18, 1e-20, 1e-22])
def test_tiny_gradients_without_eps_move_by_the_learning_rate(device, size):
    lists = adam_lists(device, sizes=(100,))
    lists.grads[0].fill_(size)
    ours, theirs = copied(lists), copied(lists)
    how = ADAM._replace(eps=0.0)
    launched(ours, how, handed(device))
    computed(theirs, how, handed(device))
    finite = theirs.params[0].isfinite()
    assert torch.equal(ours.params[0].isfinite(), finite)
    if size > 1e-21:
        # The square is a subnormal f32, but not 0.
        assert finite.all()
    # A subnormal square has few digits: a step of 0.01 is known to 2 %.
    torch.testing.assert_close(
        ours.params[0], theirs.params[0], rtol=0.0, atol=2e-4, equal_nan=True
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_twenty_steps_lead_where_torch_leads(device, kind, amsgrad):
    lists, table = (
        adam_lists(device, sizes=(3, 1025), amsgrad=amsgrad),
        table_for(device),
    )
    theirs = [torch.nn.Parameter(p.clone()) for p in lists.params]
    optimizer = kind(theirs, lr=0.01, weight_decay=0.1, amsgrad=amsgrad, fused=True)
    decoupled = kind is torch.optim.AdamW
    how = ADAM._replace(weight_decay=0.1, decoupled=decoupled)
    for step in range(20):
        fresh_grads_(lists, seed=step)
        for param, grad in zip(theirs, lists.grads, strict=True):
            param.grad = grad / 8.0
        optimizer.step()
        launched(lists, how, handed(device, 8.0, 0.0), table)
    for mine, other in zip(lists.params, theirs, strict=True):
        # Each step rounds a parameter below 4 by 2**-23 at most, in both.
        torch.testing.assert_close(mine, other.detach(), rtol=0.0, atol=20 * 2.0**-22)
