"""Copies to the host: single flags, and the rows of the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradscale import ScaleCollapsed
from gradscale.torch import GradScaler
from gradscale.torch import scaler as scalers
from gradscale.torch.device_state.async_copy import (
    LAG,
    PERIOD,
    AsyncFlag,
    AsyncTensor,
    RowCopies,
)
from gradscale.torch.device_state.layout import RING, ROW, new_device_state
from tests.torch.training import INF, backward, iterate, parameter

CPU = torch.device("cpu")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("skip", "value"),
    [(0.0, False), (1.0, True), (2.0, True), (-1.0, False), (float("nan"), True)],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_flag_above_zero_or_nan_is_set(skip, value, shape):
    assert AsyncFlag(torch.full(shape, skip)).is_set() is value


def test_a_flag_is_current_for_the_very_tensor_it_was_made_of():
    skip = torch.tensor(1.0)
    flag = AsyncFlag(skip)
    assert flag.is_current(skip)
    assert not flag.is_current(skip.clone())


def test_a_flag_is_not_current_once_the_tensor_was_written_to():
    skip = torch.tensor(0.0)
    flag = AsyncFlag(skip)
    skip.fill_(1.0)
    assert not flag.is_current(skip)


def test_a_copied_tensor_keeps_the_values_of_the_moment():
    source = torch.ones(3)
    copy = AsyncTensor(source)
    source.fill_(2.0)
    assert copy.values().tolist() == [1.0] * 3
    assert not copy.pending


@cuda
def test_a_flag_holds_the_value_of_the_moment_it_was_made():
    skip = torch.ones((), device="cuda")
    flag = AsyncFlag(skip)
    skip.fill_(0.0)
    assert flag.is_set()


@cuda
def test_a_flag_does_not_wait_for_operations_queued_after_it():
    flag = AsyncFlag(torch.ones((), device="cuda"))
    # About half a second of work.
    torch.cuda._sleep(10**9)
    later = torch.cuda.Event()
    later.record()
    assert flag.is_set()
    assert not later.query()
    torch.cuda.synchronize()


def _unscaled(**how):
    scaler, param = GradScaler("cpu", init_scale=8.0, **how), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.unscale_(optimizer)
    return scaler, optimizer, param


@pytest.fixture
def read(monkeypatch):
    """Return the values of all flags that are read."""
    values, is_set = [], AsyncFlag.is_set

    def noted(flag):
        values.append(is_set(flag))
        return values[-1]

    monkeypatch.setattr(AsyncFlag, "is_set", noted)
    return values


@pytest.mark.parametrize(("grad", "skip"), [(1.0, False), (INF, True)])
def test_a_step_reads_the_flag_that_was_sent_ahead(read, grad, skip):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, grad)
    assert read == [skip]
    assert scaler.last.applied is not skip


def test_a_flag_that_was_written_by_other_code_is_read_anew(read):
    scaler, optimizer, param = _unscaled()
    scaler._found_inf_per_device(optimizer)[CPU].fill_(1.0)
    scaler.step(optimizer)
    assert read == []
    assert param.tolist() == [0.0, 0.0]


def test_a_clip_after_unscale_may_still_skip(read):
    scaler, optimizer, param = _unscaled()
    param.grad.fill_(INF)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert read == []
    assert param.tolist() == [0.0, 0.0]


def test_a_second_read_may_still_skip(read):
    scaler, optimizer, param = _unscaled(recheck=True)
    param.grad.fill_(INF)
    scaler.step(optimizer)
    assert read == []
    assert param.tolist() == [0.0, 0.0]


def test_no_flag_is_read_for_a_fused_optimizer(read):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0, fused=True)
    iterate(scaler, optimizer, param, 1.0)
    assert read == []
    assert scaler.last.applied


class Run:
    """A device state whose rows hold their own step number in every field."""

    def __init__(self, step=0):
        self.state, self.copies = new_device_state(CPU, 8.0), RowCopies()
        self.step = step
        self.state.total.set_counts(step, 0)

    def replay(self, count=1):
        """Take steps that the host does not see."""
        for _ in range(count):
            self.state.ring[self.step % RING].fill_(self.step + 1)
            self.step += 1
            self.state.total.counts[0].fill_(self.step)

    def update(self, replayed=0):
        """Take steps the last of which the host sees; return the rows now due."""
        self.replay(replayed + 1)
        rows = self.copies.advance(self.state)
        assert all(row.record.scale == float(row.record.step) for row in rows)
        return [(row.record.step, row.update) for row in rows]

    def steps(self, count):
        return [[step for step, _ in self.update()] for _ in range(count)]


def test_the_delay_is_part_of_the_promise():
    assert (LAG, PERIOD) == (2, 4)


def test_rows_are_copied_every_fourth_update_and_read_two_updates_later():
    read = Run().steps(10)
    assert read == [[], [], [], [], [], [1, 2, 3, 4], [], [], [], [5, 6, 7, 8]]


def test_rows_are_those_of_the_moment_they_were_copied():
    run = Run()
    run.steps(4)
    run.update()
    run.state.ring.fill_(-1.0)
    run.state.total.counts.fill_(99)
    rows = run.copies.advance(run.state)
    assert [row.record.step for row in rows] == [1, 2, 3, 4]
    assert [row.record.scale for row in rows] == [1.0, 2.0, 3.0, 4.0]


def test_every_row_arrives_once_over_many_rounds_of_the_ring():
    run = Run()
    read = [step for steps in run.steps(3 * RING + LAG) for step in steps]
    assert read == list(range(1, 3 * RING + 1))
    assert run.copies.lost == 0


def test_each_row_names_its_update():
    run = Run()
    read = [row for _ in range(10) for row in run.update()]
    assert read == [(step, step) for step in range(1, 9)]


def test_of_replayed_steps_only_the_last_has_an_update():
    run = Run()
    read = [row for replayed in (0, 3, 0, 2, 0, 0) for row in run.update(replayed)]
    assert read == [(step, None) for step in range(1, 9)] + [(9, 4)]


def test_updates_after_a_replay_are_named_again():
    run = Run()
    for replayed in (5, 0, 0, 0):
        run.update(replayed)
    read = [row for _ in range(6) for row in run.update()]
    assert read[-4:] == [(10, 5), (11, 6), (12, 7), (13, 8)]


@pytest.mark.parametrize(
    ("replayed", "lost"), [(RING - 4, 0), (RING - 3, 1), (5 * RING, 4 * RING + 4)]
)
def test_rows_that_were_overwritten_are_counted_and_never_misread(replayed, lost):
    run = Run()
    read = [step for n in (0, replayed, 0, 0, 0, 0) for step, _ in run.update(n)]
    assert read == list(range(1 + lost, replayed + 5))
    assert run.copies.lost == lost


@pytest.mark.parametrize("step", [1000, 1001, 1002, 1003])
def test_a_resumed_run_reads_in_the_same_updates(step):
    run = Run(step)
    read = [(run.step, [s for s, _ in run.update()]) for _ in range(12)]
    due = [(at + 1, steps) for at, steps in read if steps]
    assert all(at % PERIOD == LAG for at, _ in due)
    assert next(s for _, steps in due for s in steps) == step + 1


def test_draining_reads_all_that_is_left_and_nothing_twice():
    run = Run()
    run.steps(7)
    assert [row.record.step for row in run.copies.drain(run.state)] == [5, 6, 7]
    assert run.copies.drain(run.state) == []
    assert [step for steps in run.steps(6) for step in steps] == [8]


@pytest.mark.parametrize("step", [0, 2, 3, 90])
def test_no_row_arrives_from_before_the_count_was_set(step):
    run = Run()
    run.steps(5)
    run.state.total.set_counts(step, 0)
    run.step = step
    read = [s for steps in run.steps(8) for s in steps]
    assert read[0] == step + 1
    assert read == list(range(step + 1, step + 1 + len(read)))


def test_a_collapse_in_steps_that_the_host_did_not_see_is_raised_late(monkeypatch):
    scaler, param = GradScaler("cpu", init_scale=2.0**-24), parameter(2)
    optimizer = torch.optim.SGD([param], lr=1.0)
    monkeypatch.setattr(scalers, "can_touch_host", lambda: False)
    for _ in range(5):
        iterate(scaler, optimizer, param, INF)
    monkeypatch.undo()
    for _ in range(PERIOD + LAG - 1):
        iterate(scaler, optimizer, param, 1.0)
    with pytest.raises(ScaleCollapsed, match="3 steps in a row"):
        iterate(scaler, optimizer, param, 1.0)
    for _ in range(2 * PERIOD):
        iterate(scaler, optimizer, param, 1.0)
    assert scaler.last.applied


class _Copies(TorchDispatchMode):
    """Counts the elements of each copy."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone):
            self.seen.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_one_copy_in_four_updates_carries_counts_and_ring():
    run = Run()
    with _Copies() as copies:
        for _ in range(PERIOD):
            run.copies.advance(run.state)
    assert copies.seen == [run.state.packed.numel()]


def test_the_counts_and_the_ring_do_not_overlap():
    state = new_device_state(CPU, 8.0)
    state.packed.fill_(-1)
    state.ring.zero_()
    assert state.total.counts.tolist() == [-1, -1, -1]
    state.total.counts.fill_(7)
    assert not state.ring.any()
    assert state.ring.data_ptr() % 16 == state.packed.data_ptr() % 16
    assert state.ring.shape == (RING, len(ROW))


@cuda
def test_pinned_memory_is_allocated_once():
    state, copies = new_device_state(torch.device("cuda"), 8.0), RowCopies()
    addresses = set()
    for _ in range(4 * PERIOD):
        state.total.counts[0].add_(1)
        copies.advance(state)
        if copies._packed is not None:
            addresses.add(copies._packed.data_ptr())
    assert len(addresses) == 1
