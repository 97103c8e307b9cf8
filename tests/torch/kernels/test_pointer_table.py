"""Pointer tables: their contents, and when they are sent again."""

import weakref
from array import array

import pytest
import torch

from gradscale.torch.grads.collect import collect
from gradscale.torch.kernels import pointer_table as tables
from gradscale.torch.kernels.pointer_table import (
    PointerTable,
    Staging,
    is_dense,
    layout_of,
)
from gradscale.torch.tensor_list import addresses
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
    table_for,
    values,
)

CHUNK = 16


@pytest.fixture
def sent(monkeypatch):
    """Count the copies to the device."""
    copies, send = [], Staging.send

    def counted(self, numbers, to, *, captured):
        copies.append(list(numbers))
        send(self, numbers, to, captured=captured)

    monkeypatch.setattr(Staging, "send", counted)
    return copies


def cells_of(table):
    return table.cells.tolist()


def test_a_column_has_the_size_the_first_chunk_and_the_addresses(device):
    table = PointerTable(device, CHUNK).of(
        [1, 16, 17, 40], [[8, 6, 4, 2], [1, 3, 5, 7]]
    )
    assert cells_of(table) == [
        [1, 16, 17, 40],
        [0, 1, 2, 4],
        [8, 6, 4, 2],
        [1, 3, 5, 7],
    ]
    assert (table.tensors, table.chunks) == (4, 7)


def test_each_chunk_knows_its_tensor(device):
    table = PointerTable(device, CHUNK).of([1, 16, 17, 40], [[0, 0, 0, 0]])
    assert table.owners.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert table.owners.dtype is torch.int32


def test_a_thousand_tensors_have_a_thousand_columns(device):
    numels = [1 + i % 50 for i in range(1000)]
    table = PointerTable(device, CHUNK).of(numels, [list(range(1000))])
    counts = torch.tensor(numels).add(CHUNK - 1).div(CHUNK, rounding_mode="floor")
    owners = torch.repeat_interleave(torch.arange(1000), counts)
    assert table.owners.tolist() == owners.tolist()
    assert cells_of(table)[2] == list(range(1000))


def test_sizes_beyond_32_bits_stand_as_they_are(device):
    cache = PointerTable(device, 2**30)
    table = cache.of([2**33 + 1, 3], [[2**62, 2**40]])
    assert cells_of(table) == [[2**33 + 1, 3], [0, 9], [2**62, 2**40]]
    assert table.owners.tolist() == [0] * 9 + [1]


def test_the_same_tensors_are_sent_once(device, sent):
    cache = PointerTable(device, CHUNK)
    tensors = [torch.empty(3, device=device), torch.empty(20, device=device)]
    made = [cache.of([3, 20], [addresses(tensors)]) for _ in range(3)]
    assert len(sent) == 1
    assert made[0] is made[1] is made[2]


def test_a_gradient_in_new_memory_is_sent_and_the_owners_stay(device, sent):
    cache = PointerTable(device, CHUNK)
    before = cache.of([3, 20], [[1, 2]])
    after = cache.of([3, 20], [[1, 9]])
    assert len(sent) == 2
    assert cells_of(after)[2] == [1, 9]
    # In place: memory that is made anew in each step would cost time.
    assert after.cells.data_ptr() == before.cells.data_ptr()
    assert after.owners is before.owners


def test_a_row_that_alone_has_changed_is_sent_alone(device, sent):
    cache = PointerTable(device, CHUNK)
    cache.of([3, 20], [[1, 2], [3, 4], [5, 6]])
    after = cache.of([3, 20], [[1, 2], [7, 4], [5, 6]])
    assert sent[-1] == [7, 4]
    assert cells_of(after)[2:] == [[1, 2], [7, 4], [5, 6]]


def test_rows_that_have_changed_together_are_all_sent(device, sent):
    cache = PointerTable(device, CHUNK)
    cache.of([3, 20], [[1, 2], [3, 4], [5, 6]])
    after = cache.of([3, 20], [[1, 2], [7, 4], [5, 8]])
    assert len(sent) == 2
    assert cells_of(after)[2:] == [[1, 2], [7, 4], [5, 8]]


def test_other_sizes_at_the_same_addresses_are_another_table(device, sent):
    cache = PointerTable(device, CHUNK)
    cache.of([3, 20], [[1, 2]])
    after = cache.of([20, 3], [[1, 2]])
    assert len(sent) == 2
    assert cells_of(after) == [[20, 3], [0, 2], [1, 2]]
    assert after.owners.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("numels", "rows"),
    [
        ([3, 20, 5], [[1, 2, 3]]),
        ([3], [[1]]),
        ([20], [[2]]),
        ([3, 20], [[1, 2], [3, 4]]),
    ],
    ids=["added", "last removed", "first removed", "one more list"],
)
def test_tensors_that_come_and_go_are_another_table(device, numels, rows):
    cache = PointerTable(device, CHUNK)
    cache.of([3, 20], [[1, 2]])
    table = cache.of(numels, rows)
    alone = PointerTable(device, CHUNK).of(numels, rows)
    assert cells_of(table) == cells_of(alone)
    assert table.owners.tolist() == alone.owners.tolist()
    assert (table.tensors, table.chunks) == (alone.tensors, alone.chunks)


def test_a_table_that_was_left_is_right_when_it_comes_back(device):
    cache = PointerTable(device, CHUNK)
    first = cells_of(cache.of([3, 20], [[1, 2]]))
    cache.of([7], [[9]])
    assert cells_of(cache.of([3, 20], [[1, 2]])) == first


@pytest.fixture
def capturing(monkeypatch):
    """Act as if a graph were captured: copies are noted down and do not run."""
    state = {"on": False}
    send = Staging.send

    def recorded(self, numbers, to, *, captured):
        if captured:
            to.fill_(-1)
        else:
            send(self, numbers, to, captured=False)

    monkeypatch.setattr(tables, "capturing", lambda device: state["on"])
    monkeypatch.setattr(Staging, "send", recorded)
    return state


def test_a_table_that_a_graph_uses_is_never_written_again(capturing):
    cache = PointerTable(torch.device("cpu"), CHUNK)
    eager = cache.of([3], [[1]])
    capturing["on"] = True
    in_graph = cache.of([3], [[1]])
    capturing["on"] = False
    after = cache.of([3], [[2]])
    assert in_graph is eager
    assert cells_of(in_graph)[2] == [1]
    assert cells_of(after)[2] == [2]


def test_a_captured_table_is_new_memory(capturing):
    cache = PointerTable(torch.device("cpu"), CHUNK)
    eager = cache.of([3], [[1]])
    capturing["on"] = True
    in_graph = cache.of([3], [[2]])
    assert in_graph.cells.data_ptr() != eager.cells.data_ptr()
    assert cells_of(eager)[2] == [1]


def test_outside_a_graph_no_table_is_used_that_only_a_replay_would_fill(capturing):
    cache = PointerTable(torch.device("cpu"), CHUNK)
    capturing["on"] = True
    cache.of([3], [[1]])
    capturing["on"] = False
    assert cells_of(cache.of([3], [[1]])) == [[3], [0], [1]]


def test_owners_that_only_a_replay_would_fill_are_not_used_either(
    capturing, monkeypatch
):
    cache, fill = PointerTable(torch.device("cpu"), CHUNK), tables.fill_owners_

    def recorded(owners, cells, tensors):
        if capturing["on"]:
            owners.fill_(-1)
        else:
            fill(owners, cells, tensors)

    monkeypatch.setattr(tables, "fill_owners_", recorded)
    capturing["on"] = True
    cache.of([3, 20], [[1, 2]])
    capturing["on"] = False
    assert cache.of([3, 20], [[5, 6]]).owners.tolist() == [0, 1, 1]


def test_a_second_graph_does_not_count_on_the_first_being_replayed(capturing):
    cache = PointerTable(torch.device("cpu"), CHUNK)
    capturing["on"] = True
    first = cache.of([3], [[1]])
    # A graph that shares the pool of the first has its gradients where that had them.
    second = cache.of([3], [[1]])
    assert second.cells.data_ptr() != first.cells.data_ptr()


class Copied:
    """An event that says how far a copy is."""

    def __init__(self, done=True):
        self.done, self.recorded, self.asked = done, 0, 0

    def query(self):
        self.asked += 1
        return self.done

    def record(self, stream):
        self.recorded += 1


@pytest.fixture
def staging(monkeypatch):
    """A staging area for a device, its slots in ordinary memory."""
    empty = torch.empty

    def unpinned(*shape, pin_memory=False, **how):
        return empty(*shape, **how)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return Staging(torch.device("cuda"))


def send(staging, values, *, captured=False):
    to = torch.empty(len(values), dtype=torch.int64)
    staging.send(array("q", values), to, captured=captured)
    assert to.tolist() == values


def test_a_slot_under_copy_is_left_alone(staging):
    send(staging, [1, 2, 3])
    slot, event = staging._slots[-1]
    event.done = False
    for i in range(3 * tables.SLOTS):
        send(staging, [i, i, i])
        staging._slots[-1][1].done = False
    assert slot.tolist() == [1, 2, 3]
    assert event.recorded == 1


def test_slots_are_used_again_when_their_copies_have_ended(staging):
    for i in range(5 * tables.SLOTS):
        send(staging, [i, i])
    assert len(staging._slots) + len(staging._fresh) == tables.SLOTS


def test_a_larger_table_gets_larger_slots(staging):
    send(staging, [1])
    send(staging, [1, 2, 3, 4, 5])
    send(staging, [6])
    slots = [slot for slot, _ in (*staging._slots, *staging._fresh)]
    assert max(slot.numel() for slot in slots) >= 5


def test_the_slot_of_a_graph_lives_as_long_as_its_table_may_be_replayed(staging):
    send(staging, [7, 7])
    held = [weakref.ref(slot) for slot, _ in staging._fresh]
    send(staging, [1, 2], captured=True)
    for i in range(3 * tables.SLOTS):
        send(staging, [i, i])
    alive = [slot for ref in held if (slot := ref()) is not None]
    assert [1, 2] in [slot.tolist() for slot in alive]


def test_no_event_is_asked_while_a_graph_is_captured(staging):
    # CUDA ends a capture in which an event is queried.
    for i in range(2 * tables.SLOTS):
        send(staging, [i, i])
    events = [event for _, event in staging._slots]
    asked = [event.asked for event in events]
    send(staging, [1, 2], captured=True)
    assert [event.asked for event in events] == asked


# --- tables of lists ------------------------------------------------------------------


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


def table_of(*lists, table=None, steps=()):
    table = PointerTable(torch.device("cpu"), CHUNK) if table is None else table
    return table.of_lists(lists, layout_of(lists, list(steps)))


def test_tensors_in_one_order_are_in_the_table_and_the_rest_is_returned():
    params = [zeros(3), zeros(4, 6).t(), zeros(8)[::2], zeros(0), zeros(2, 3)]
    grads = [zeros(3), zeros(6, 4), zeros(4), zeros(0), zeros(2, 3)]
    table, rest = table_of(params, grads)
    assert rest == [1, 2, 3]
    assert table.cells[0].tolist() == [3, 6]
    assert table.cells[2].tolist() == [params[0].data_ptr(), params[4].data_ptr()]


def test_tensors_of_one_order_without_gaps_are_processed_together():
    params, grads = [zeros(4, 6).t()], [zeros(4, 6).t()]
    table, rest = table_of(params, grads)
    assert rest == []
    assert table.cells[0].tolist() == [24]


def test_where_none_can_be_processed_there_is_no_table():
    assert table_of([zeros(8)[::2], zeros(0)], [zeros(4), zeros(0)]) == (None, [0, 1])


def test_steps_are_the_last_row():
    count = torch.zeros(())
    table, _ = table_of([zeros(3)], [zeros(3)], steps=[count])
    assert table.cells[-1].tolist() == [count.data_ptr()]


def test_the_same_lists_are_sent_once(sent):
    params, grads = [zeros(3), zeros(4)], [zeros(3), zeros(4)]
    kept = PointerTable(torch.device("cpu"), CHUNK)
    for _ in range(3):
        table_of(params, grads, table=kept)
    assert len(sent) == 1
    table_of(params, [zeros(3), zeros(4)], table=kept)
    assert len(sent) == 2


def test_unchanged_lists_are_not_checked_tensor_by_tensor(monkeypatch):
    checked, check = [], tables._unprocessable
    monkeypatch.setattr(
        tables, "_unprocessable", lambda lists: checked.append(1) or check(lists)
    )
    params, grads, momenta = ([zeros(3), zeros(4)] for _ in range(3))
    kept = PointerTable(torch.device("cpu"), CHUNK)
    for _ in range(3):
        table_of(params, grads, momenta, table=kept)
        grads = [zeros(3), zeros(4)]
    assert len(checked) == 1


def test_a_snapshot_of_the_gradients_is_trusted(device, monkeypatch):
    params = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in (3, 20)]
    for param in params:
        param.grad = torch.ones_like(param)
    grads = [param.grad for param in params]
    snapshot = collect(params, allow_fp16=False)
    whole = layout_of([params, grads, grads])
    seen = []
    monkeypatch.setattr(
        tables, "addresses", lambda one: seen.append(one) or addresses(one)
    )
    assert layout_of([params, grads, grads], grads=snapshot) == whole
    assert [one is params for one in seen] == [True, False]
    assert len(seen) == 2


def test_other_sizes_at_the_same_addresses_are_seen_in_a_step(device):
    room, grad = torch.zeros(10, device=device), torch.ones(10, device=device)
    lists = momentum_lists(device, sizes=(10,), momenta=False)
    how, kept = SGD._replace(lr=1.0), table_for(device)
    for size in (10, 4, 7):
        lists = lists._replace(params=[room[:size]], grads=[grad[:size]])
        launched(lists, how, handed(device), kept)
    assert room.tolist() == [-3.0] * 4 + [-2.0] * 3 + [-1.0] * 3


@pytest.mark.parametrize("turned", ["params", "grads", "momenta"])
def test_another_order_at_the_same_address_is_seen(device, turned):
    lists, kept = momentum_lists(device, sizes=((3, 3),)), table_for(device)
    theirs, how = copied(lists), SGD._replace(momentum=0.5)
    given = handed(device)
    launched(lists, how, given, kept)
    computed(theirs, how, given)
    ours, theirs = (
        one._replace(**{turned: [getattr(one, turned)[0].t()]})
        for one in (lists, theirs)
    )
    launched(ours, how, given, kept)
    computed(theirs, how, given)
    assert_close(ours, theirs)


def test_parameters_that_come_and_go_are_seen(device):
    lists, kept = adam_lists(device, sizes=(3, 5, 1030)), table_for(device)
    ours, theirs = copied(lists), copied(lists)
    for chosen in ([0, 1, 2], [0, 2], [2], [1, 2], [2, 1, 0]):
        for one, step in ((ours, launched), (theirs, computed)):
            part = type(one)(*([c[i] for i in chosen] if c else [] for c in one))
            more = (kept,) if step is launched else ()
            step(part, ADAM, handed(device), *more)
    assert_close(ours, theirs)
    assert [step.item() for step in ours.steps] == [3.0, 3.0, 5.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.data.t(),
        lambda tensor: tensor.data[:1],
        lambda tensor: tensor.data.double(),
    ],
    ids=["order", "size", "dtype"],
)
@pytest.mark.parametrize("place", [0, 2])
def test_data_that_is_replaced_is_seen(change, place):
    lists = [[zeros(2, 2), zeros(2, 2)] for _ in range(3)]
    kept = PointerTable(torch.device("cpu"), CHUNK)
    assert table_of(*lists, table=kept)[1] == []
    lists[place][1].data = change(lists[place][1])
    assert table_of(*lists, table=kept)[1] == [1]


def test_a_count_in_new_memory_is_seen():
    params, grads, steps = [zeros(3)], [zeros(3)], [torch.zeros(())]
    kept = PointerTable(torch.device("cpu"), CHUNK)
    for _ in range(2):
        table, _ = table_of(params, grads, table=kept, steps=steps)
        assert table.cells[-1].tolist() == [steps[0].data_ptr()]
        steps[0].data = torch.zeros(())


def test_gradients_in_new_memory_are_seen(device):
    lists, kept = adam_lists(device, sizes=(3, 1030)), table_for(device)
    ours, theirs = copied(lists), copied(lists)
    alive = []
    for seed in range(4):
        grads = values((3, 1030), device, seed=seed)
        # The old ones stay alive, so that each new one has a new address.
        alive.append(grads)
        launched(ours._replace(grads=grads), ADAM, handed(device), kept)
        computed(theirs._replace(grads=grads), ADAM, handed(device))
    assert_close(ours, theirs)
