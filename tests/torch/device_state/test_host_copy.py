"""Late, non-blocking reading of device facts."""

from typing import ClassVar

import pytest
import torch
from tests.torch.letter_writing import write
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale import ScaleCollapsed
from gradscale.torch import GradScaler
from gradscale.torch import scaler as scalers
from gradscale.torch.device_state import host_copy as mailbox
from gradscale.torch.device_state.host_copy import LAG, Mailbox, _Copy
from gradscale.torch.device_state.layout import RING, ROW, new_device_state
from tests.torch.training import INF, iterate, parameter

CPU = torch.device("cpu")


@pytest.fixture(params=["copies", "letters"], autouse=True)
def kind(request):
    """Run every test by both ways on which facts reach the host."""
    Run.by = request.param


class Run:
    """A ledger whose rows hold their own step number in every field."""

    by = "copies"

    def __init__(self, step=0):
        self.ledger, self.box = new_device_state(CPU, 8.0), Mailbox()
        self.step = step
        self.ledger.total.set_tally(step, 0)

    def replay(self, count=1):
        """Take steps of which the host knows nothing."""
        for _ in range(count):
            self.ledger.ring[self.step % RING].fill_(self.step + 1)
            self.step += 1
            self.ledger.total.tally[0].fill_(self.step)

    def update(self, replayed=0):
        """Take steps the last of which the host sees; return those that are due."""
        self.replay(replayed)
        if self.by == "letters":
            letter, known = self.box.letter(self.ledger)
        self.replay()
        if self.by == "letters":
            write(letter, self.ledger, known)
        late = self.box.exchange(self.ledger)
        if late is None:
            return None
        assert all(one.row == [float(one.step)] * len(ROW) for one in late)
        return [one.step for one in late]


def test_facts_arrive_two_steps_late_and_in_order():
    run = Run()
    assert [run.update() for _ in range(5)] == [None, None, [1], [2], [3]]


def test_the_lag_is_two():
    # Guards act on the facts of exactly this many steps ago; it is part of the promise.
    assert LAG == 2


def test_facts_are_those_of_the_moment_they_were_posted():
    run = Run()
    run.update()
    run.update()
    run.ledger.ring.fill_(-1.0)
    run.ledger.total.tally.fill_(99)
    assert run.box.exchange(run.ledger) == [(1, [1.0] * len(ROW), None)]


def test_every_row_arrives_once_over_many_rounds_of_the_ring():
    run = Run()
    late = [run.update() for _ in range(3 * RING)]
    assert late[LAG:] == [[step] for step in range(1, 3 * RING - 1)]
    assert run.box.lost == 0


def test_steps_that_were_replayed_are_caught_up_with():
    run = Run()
    late = [run.update(replayed) for replayed in (0, 3, 0, 2, 0, 0)]
    assert late == [None, None, [1], [2, 3, 4, 5], [6], [7, 8, 9]]


def test_steps_that_were_replayed_before_the_first_update_are_caught_up_with():
    run = Run()
    assert [run.update(5), run.update(), run.update()][-1] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("replayed", "lost"), [(RING - 1, 0), (RING, 1), (5 * RING, 4 * RING + 1)]
)
def test_rows_that_were_overwritten_are_counted_and_never_misread(replayed, lost):
    run = Run()
    run.update()
    run.update(replayed)
    assert run.update() == [1]
    newest = replayed + 2
    assert run.update() == list(range(2 + lost, newest + 1))
    assert run.box.lost == lost
    assert run.update() == [newest + 1]


def test_a_resumed_count_goes_on_from_where_it_was_set():
    run = Run(step=1000)
    assert [run.update() for _ in range(4)] == [None, None, [1001], [1002]]
    assert run.box.lost == 0


def test_nothing_arrives_from_before_a_clearing():
    run = Run()
    for _ in range(4):
        run.update()
    run.box.clear()
    assert [run.update() for _ in range(4)] == [[], [], [5], [6]]


def test_steps_replayed_after_a_clearing_do_arrive():
    run = Run()
    for _ in range(4):
        run.update()
    run.box.clear()
    assert [run.update(2) for _ in range(3)] == [[], [], [5, 6, 7]]


@pytest.mark.parametrize("step", [0, 2, 3, 90])
def test_nothing_arrives_from_before_the_count_was_set(step):
    run = Run()
    for _ in range(4):
        run.update()
    run.ledger.total.set_tally(step, 0)
    run.step = step
    late = [run.update() for _ in range(4)]
    assert late == [None, None, [step + 1], [step + 2]]


def test_steps_replayed_after_the_count_was_set_do_arrive():
    run = Run()
    for _ in range(4):
        run.update()
    run.ledger.total.set_tally(1, 0)
    run.step = 1
    assert [run.update(1) for _ in range(3)][-1] == [2, 3]


def test_a_collapse_in_steps_that_the_host_did_not_see_is_raised_late(monkeypatch):
    scaler, param = GradScaler("cpu", init_scale=2.0**-24), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    monkeypatch.setattr(scalers, "host_may_act", lambda: False)
    for _ in range(5):
        iterate(scaler, optimizer, param, INF)
    monkeypatch.undo()
    iterate(scaler, optimizer, param, 1.0)
    iterate(scaler, optimizer, param, 1.0)
    with pytest.raises(ScaleCollapsed, match="3 steps in a row"):
        iterate(scaler, optimizer, param, 1.0)
    for _ in range(4):
        iterate(scaler, optimizer, param, 1.0)
    assert scaler.last.applied


class _Elsewhere(torch.Tensor):
    """A tensor on a device without events; writes down when it is read."""

    reads: ClassVar[list[int]] = []

    @property
    def device(self):
        return torch.device("xpu")

    def cpu(self):
        self.reads.append(self.tolist()[0])
        return super().cpu()


def test_on_other_devices_too_only_facts_two_steps_old_are_read_and_at_once():
    _Elsewhere.reads.clear()
    run = Run()
    run.by = "copies"
    run.ledger.sheet = run.ledger.sheet.as_subclass(_Elsewhere)
    for _ in range(4):
        run.update()
    assert _Elsewhere.reads == [1, 2]


class _Event:
    """Says of each slot whether it was waited for since it was last posted."""

    def __init__(self):
        self.waited_for = True

    def record(self, stream):
        assert self.waited_for
        self.waited_for = False

    def query(self):
        return self.waited_for

    def synchronize(self):
        self.waited_for = True


class _OnCuda(torch.Tensor):
    @property
    def device(self):
        return torch.device("cuda")


def test_copies_are_made_once_and_filled_again_only_after_a_wait(monkeypatch):
    made = []

    def pinned_copy(like):
        made.append(_Copy(torch.empty(like.shape, dtype=like.dtype), _Event()))
        return made[-1]

    monkeypatch.setattr(mailbox, "_pinned_copy", pinned_copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    run = Run()
    run.by = "copies"
    run.ledger.sheet = run.ledger.sheet.as_subclass(_OnCuda)
    late = [run.update() for _ in range(3)]
    run.box.clear()
    late += [run.update() for _ in range(5)]
    assert late == [None, None, [1], [], [], [4], [5], [6]]
    assert len(made) == LAG + 1


class _Copies(TorchDispatchMode):
    """Counts what is copied."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone):
            self.seen.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [torch.Tensor, _OnCuda])
def test_one_copy_carries_all_of_it(kind, monkeypatch):
    monkeypatch.setattr(
        mailbox,
        "_pinned_copy",
        lambda like: _Copy(torch.empty(like.shape, dtype=like.dtype), _Event()),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    run = Run()
    run.replay()
    sheet = run.ledger.sheet
    run.ledger.sheet = sheet.as_subclass(kind)
    with _Copies() as copies:
        run.box.exchange(run.ledger)
    assert copies.seen == [sheet.numel()]


def test_the_tally_and_the_ring_lie_apart_on_the_sheet():
    ledger = new_device_state(CPU, 8.0)
    ledger.sheet.fill_(-1)
    ledger.ring.zero_()
    assert ledger.total.tally.tolist() == [-1, -1, -1]
    ledger.total.tally.fill_(7)
    assert not ledger.ring.any()
    assert ledger.ring.data_ptr() % 16 == ledger.sheet.data_ptr() % 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_copys_are_made_once_and_reused():
    ledger, box = new_device_state(torch.device("cuda"), 8.0), Mailbox()
    addresses = set()
    for _ in range(4 * LAG):
        ledger.total.tally[0].add_(1)
        box.exchange(ledger)
        addresses |= {one.sheet.data_ptr() for one in (*box._posted, *box._copies)}
    assert len(addresses) == LAG + 1
