"""The passes on the CPU by torch's fused operators, against the reference."""

import pytest
import torch

from gradscale.torch.kernels import optimizer_pass
from gradscale.torch.kernels import plain as reference
from tests.torch.kernels.passes import (
    ADAM,
    SGD,
    adam_lists,
    assert_close,
    bits,
    copied,
    handed,
    momentum_lists,
    table_for,
)

CPU = torch.device("cpu")
SIZES = (1, 7, 65)

PASSES = {
    "AdamW": (adam_lists, {}, ADAM, optimizer_pass._torch_adam_, reference.adam_),
    "Adam": (
        adam_lists,
        {"amsgrad": True},
        ADAM._replace(decoupled=False, weight_decay=0.1, maximize=True),
        optimizer_pass._torch_adam_,
        reference.adam_,
    ),
    "SGD": (
        momentum_lists,
        {},
        SGD._replace(momentum=0.9, nesterov=True, weight_decay=0.1),
        optimizer_pass._torch_sgd_,
        reference.sgd_,
    ),
}
passes = pytest.mark.parametrize("name", PASSES)


def both(name, given, steps=3, **how):
    make, options, settings, ours, theirs = PASSES[name]
    lists = make(CPU, sizes=SIZES, **options, **how)
    other = copied(lists)
    assert optimizer_pass._torch_takes(lists)
    for _ in range(steps):
        ours(lists, settings, given)
        theirs(other, settings, given)
    return lists, other


@passes
@pytest.mark.parametrize("scale", [None, 8.0])
def test_torchs_operators_give_the_steps_of_the_reference(name, scale):
    ours, theirs = both(name, handed(CPU, scale, 0.0))
    assert_close(ours, theirs)
    assert [s.item() for s in ours.steps] == [s.item() for s in theirs.steps]


@passes
def test_a_skip_leaves_every_bit(name):
    make, options, settings, ours, _ = PASSES[name]
    lists = make(CPU, sizes=SIZES, **options)
    before = [[bits(t) for t in column] for column in lists]
    ours(lists, settings, handed(CPU, 8.0, 1.0))
    after = [[bits(t) for t in column] for column in lists]
    assert all(
        torch.equal(a, b)
        for now, then in zip(after, before, strict=True)
        for a, b in zip(now, then, strict=True)
    )


@passes
def test_the_gradients_are_written_only_where_asked(name):
    lists, _ = both(name, handed(CPU, 8.0, 0.0), steps=1)
    written, _ = both(name, handed(CPU, 8.0, 0.0, True), steps=1)
    for left, divided in zip(lists.grads, written.grads, strict=True):
        assert torch.equal(left / 8.0, divided)


@passes
def test_a_step_is_a_write_to_the_parameter(name):
    make, options, settings, ours, _ = PASSES[name]
    lists = make(CPU, sizes=SIZES, **options)
    before = [param._version for param in lists.params]
    ours(lists, settings, handed(CPU, None, 0.0))
    after = [param._version for param in lists.params]
    assert all(a > b for a, b in zip(after, before, strict=True))


def test_tensors_with_gaps_are_left_to_the_reference():
    lists = momentum_lists(CPU, sizes=(8,))
    gaps = lists._replace(params=[torch.zeros(16)[::2]])
    assert optimizer_pass._torch_takes(lists)
    assert not optimizer_pass._torch_takes(gaps)


def test_other_devices_are_left_to_the_reference():
    lists = momentum_lists(CPU, sizes=(8,))
    assert not optimizer_pass._torch_takes(
        lists._replace(params=[torch.zeros(8, device="meta")])
    )


def test_a_dampened_momentum_is_left_to_the_reference():
    # Each parameter may be at its first step or beyond.
    lists = momentum_lists(CPU, sizes=SIZES, steps=True)
    lists.steps[1].fill_(3.0)
    ours, theirs = copied(lists), copied(lists)
    how, given = SGD._replace(momentum=0.9, dampening=0.5), handed(CPU, 8.0, 0.0)
    optimizer_pass.sgd_(ours, how, given, None, table_for(CPU))
    reference.sgd_(theirs, how, given)
    assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_masters_and_f64_take_the_steps_of_the_reference(dtype):
    lists = adam_lists(CPU, sizes=SIZES, param=dtype, grad=dtype)
    if dtype is torch.float64:
        wide = ([t.double() for t in column] for column in lists[:-1])
        lists = type(lists)(*wide, lists.steps)._replace(masters=[])
    assert optimizer_pass._torch_takes(lists)
    ours, theirs = copied(lists), copied(lists)
    how = ADAM._replace(weight_decay=0.1)
    for _ in range(3):
        optimizer_pass._torch_adam_(ours, how, handed(CPU, 8.0, 0.0))
        reference.adam_(theirs, how, handed(CPU, 8.0, 0.0))
    assert_close(ours, theirs)
