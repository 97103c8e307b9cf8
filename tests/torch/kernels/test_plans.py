"""What a kernel can walk, and that a plan is never used for other tensors."""

import pytest
import torch

from gradscale.torch import tensor_list
from gradscale.torch.kernels.plans import Plans, is_dense
from gradscale.torch.kernels.pointer_table import Staging
from tests.torch.kernels.passes import (
    ADAM,
    SGD,
    adam_lists,
    assert_close,
    computed,
    copied,
    handed,
    launched,
    momentum_lists,
    values,
)

CHUNK = 64


def zeros(*shape, stride=None):
    made = torch.zeros(shape)
    return made if stride is None else torch.empty_strided(shape, stride).zero_()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((3, 4), (4, 1)),
        ((3, 4), (1, 3)),
        ((2, 3, 5, 7), (105, 1, 21, 3)),
        ((5,), (1,)),
        ((), ()),
        ((1, 5, 1), (99, 1, 7)),
        ((1,), (3,)),
    ],
)
def test_tensors_without_gaps_are_dense(shape, stride):
    assert is_dense(zeros(*shape, stride=stride))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3, 4), (5, 1)), ((3, 4), (8, 2)), ((3,), (0,)), ((2, 2), (1, 1)), ((4,), (2,))],
)
def test_tensors_with_gaps_or_overlaps_are_not_dense(shape, stride):
    assert not is_dense(torch.as_strided(torch.zeros(64), shape, stride))


def plan_of(*lists, plans=None, steps=()):
    return (Plans() if plans is None else plans).of(lists, list(steps), CHUNK)


def test_tensors_in_step_are_in_the_table_and_the_rest_is_named():
    params = [zeros(3), zeros(4, 6).t(), zeros(8)[::2], zeros(0), zeros(2, 3)]
    grads = [zeros(3), zeros(6, 4), zeros(4), zeros(0), zeros(2, 3)]
    table, rest = plan_of(params, grads)
    assert rest == [1, 2, 3]
    assert table.cells[0].tolist() == [3, 6]
    assert table.cells[2].tolist() == [params[0].data_ptr(), params[4].data_ptr()]


def test_tensors_of_one_order_without_gaps_are_walked_together():
    params, grads = [zeros(4, 6).t()], [zeros(4, 6).t()]
    table, rest = plan_of(params, grads)
    assert rest == []
    assert table.cells[0].tolist() == [24]


def test_where_none_can_be_walked_there_is_no_table():
    assert plan_of([zeros(8)[::2], zeros(0)], [zeros(4), zeros(0)]) == (None, [0, 1])


def test_steps_are_the_last_row():
    count = torch.zeros(())
    table, _ = plan_of([zeros(3)], [zeros(3)], steps=[count])
    assert table.cells[-1].tolist() == [count.data_ptr()]


def test_a_plan_that_holds_sends_nothing(monkeypatch):
    sent, plans = [], Plans()
    send = Staging.send

    def counted(self, numbers, to, *, captured):
        sent.append(1)
        send(self, numbers, to, captured=captured)

    monkeypatch.setattr(Staging, "send", counted)
    params, grads = [zeros(3), zeros(8)[::2]], [zeros(3), zeros(4)]
    for _ in range(3):
        plan_of(params, grads, plans=plans)
    assert len(sent) == 1
    plan_of(params, [zeros(3), zeros(4)], plans=plans)
    assert len(sent) == 2


def test_other_sizes_at_the_same_addresses_are_seen(device):
    room, grad = torch.zeros(10, device=device), torch.ones(10, device=device)
    lists = momentum_lists(device, sizes=(10,), momenta=False)
    how, plans = SGD._replace(lr=1.0), Plans()
    for size in (10, 4, 7):
        lists = lists._replace(params=[room[:size]], grads=[grad[:size]])
        launched(lists, how, handed(device), plans)
    assert room.tolist() == [-3.0] * 4 + [-2.0] * 3 + [-1.0] * 3


@pytest.mark.parametrize("turned", ["params", "grads", "momenta"])
def test_another_order_at_the_same_address_is_seen(device, turned):
    lists, plans = momentum_lists(device, sizes=((3, 3),)), Plans()
    theirs, how = copied(lists), SGD._replace(momentum=0.5)
    given = handed(device)
    launched(lists, how, given, plans)
    computed(theirs, how, given)
    ours, theirs = (
        one._replace(**{turned: [getattr(one, turned)[0].t()]})
        for one in (lists, theirs)
    )
    launched(ours, how, given, plans)
    computed(theirs, how, given)
    assert_close(ours, theirs)


def test_tensors_that_come_and_go_are_seen(device):
    lists, plans = adam_lists(device, sizes=(3, 5, 1030)), Plans()
    ours, theirs = copied(lists), copied(lists)
    for chosen in ([0, 1, 2], [0, 2], [2], [1, 2], [2, 1, 0]):
        for one, step in ((ours, launched), (theirs, computed)):
            part = type(one)(*([c[i] for i in chosen] if c else [] for c in one))
            more = (plans,) if step is launched else ()
            step(part, ADAM, handed(device), *more)
    assert_close(ours, theirs)
    assert [step.item() for step in ours.steps] == [3.0, 3.0, 5.0]


def test_a_parameter_that_lies_otherwise_at_its_address_is_seen():
    plans, lists = Plans(), [[zeros(2, 2), zeros(2, 2)] for _ in range(3)]
    assert plans.of(lists, [], CHUNK).rest == []
    lists[0][1].data = lists[0][1].data.t()
    assert plans.of(lists, [], CHUNK).rest == [1]


def test_a_shorter_parameter_at_its_address_is_seen():
    plans, lists = Plans(), [[zeros(2, 2), zeros(2, 2)] for _ in range(3)]
    assert plans.of(lists, [], CHUNK).rest == []
    lists[0][1].data = lists[0][1].data[:1]
    assert plans.of(lists, [], CHUNK).rest == [1]


def planned():
    """Return plans of two parameters, and the lists that they are of."""
    plans, lists = Plans(), [[zeros(3), zeros(3)] for _ in range(3)]
    steps = [torch.zeros(()), torch.zeros(())]
    plans.of(lists, steps, CHUNK)
    return plans, lists, steps


def test_what_was_confirmed_is_not_looked_at_again(monkeypatch):
    plans, (params, grads, momenta), steps = planned()
    others, numels = [steps, momenta, params], tensor_list.numbers([3, 3])
    for known in (numels, None):
        assert plans.confirm(others, known)
        with monkeypatch.context() as patch:
            patch.setattr(tensor_list, "as_before", None)
            assert plans.of([params, grads, momenta], steps, CHUNK).rest == []


def test_a_confirmation_is_for_one_step():
    plans, lists, steps = planned()
    assert plans.confirm([lists[0], lists[2], steps], None)
    plans.of(lists, steps, CHUNK)
    lists[2][1].data = zeros(3)
    table, _ = plans.of(lists, steps, CHUNK)
    assert lists[2][1].data_ptr() in table.cells.flatten().tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda lists, steps: setattr(lists[0][1], "data", zeros(3)),
        lambda lists, steps: setattr(lists[2][0], "data", zeros(4)),
        lambda lists, steps: setattr(steps[1], "data", torch.ones(())),
        lambda lists, steps: lists.__setitem__(2, list(lists[2])),
    ],
    ids=["elsewhere", "larger", "count", "another list"],
)
def test_what_has_changed_is_not_confirmed(change):
    plans, lists, steps = planned()
    change(lists, steps)
    assert not plans.confirm([lists[0], lists[2], steps], None)


def test_neither_are_gradients_of_another_size_nor_is_what_was_never_planned():
    plans, (params, _, momenta), steps = planned()
    assert not plans.confirm([params, momenta, steps], tensor_list.numbers([3, 4]))
    assert not Plans().confirm([params], None)


def test_a_count_in_new_memory_is_seen():
    plans, params, grads = Plans(), [zeros(3)], [zeros(3)]
    steps = [torch.zeros(())]
    for _ in range(2):
        table, _ = plans.of([params, grads], steps, CHUNK)
        assert table.cells[-1].tolist() == [steps[0].data_ptr()]
        steps[0].data = torch.zeros(())


def test_lists_without_counts_are_looked_at_once(monkeypatch):
    looked, plans, look = [], Plans(), Plans._look

    def counted(self, lists):
        looked.append(1)
        look(self, lists)

    monkeypatch.setattr(Plans, "_look", counted)
    params, grads, momenta = ([zeros(3), zeros(4)] for _ in range(3))
    for _ in range(3):
        plans.of([params, grads, momenta], [], CHUNK)
    assert len(looked) == 1


def test_gradients_in_new_memory_are_seen(device):
    lists, plans = adam_lists(device, sizes=(3, 1030)), Plans()
    ours, theirs = copied(lists), copied(lists)
    kept = []
    for seed in range(4):
        grads = values((3, 1030), device, seed=seed)
        # The old ones stay: no new one can lie where one of them lay.
        kept.append(grads)
        launched(ours._replace(grads=grads), ADAM, handed(device), plans)
        computed(theirs._replace(grads=grads), ADAM, handed(device))
    assert_close(ours, theirs)
