"""Asynchronous copies to the host; only reading the value waits."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.core.records import StepRecord
from gradscale.torch.device_state.layout import (
    RING,
    DeviceRow,
    DeviceState,
    split_packed,
)

# The rows on the device are copied in every PERIOD-th update, and read LAG updates
# later: a row is LAG to LAG + PERIOD - 1 updates old when it is read. Both are counted
# in updates, so every rank, and a resumed run, reads the same rows in the same call.
PERIOD = 4
LAG = 2


class AsyncTensor:
    """A tensor whose copy to the host starts at once. No host sync.

    >>> AsyncTensor(torch.ones(2)).values().tolist()
    [1.0, 1.0]
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._event = _start_copy(tensor, self._values)
        else:
            # A copy, since it may be written in place; elsewhere the read itself waits.
            self._values = tensor.clone()

    @property
    def pending(self) -> bool:
        """Whether a read may wait for the device; the same on every rank."""
        return self._event is not None

    def values(self) -> Tensor:
        """Return the values, on the host. Waits for this copy alone."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.cpu()


class AsyncFlag:
    """A flag whose copy to the host is enqueued at once; reading waits for it alone.

    Must not be used while a graph is being captured or compiled.

    >>> AsyncFlag(torch.tensor(1.0)).is_set()
    True

    Args:
        flag: f32 of one element; 0 is False, all else True, NaN too.
    """

    def __init__(self, flag: Tensor) -> None:
        self._flag = flag
        self._version = flag._version
        self._copy: AsyncTensor | None = None
        if flag.device.type == "cuda":
            self._copy = AsyncTensor(flag)

    def is_current(self, flag: Tensor) -> bool:
        """Return whether this is the copied flag, unmodified since."""
        return flag is self._flag and flag._version == self._version

    def is_set(self) -> bool:
        """Return the flag. Waits for its copy alone."""
        value = self._flag if self._copy is None else self._copy.values()
        return not value.item() <= 0.0


class HostRow(NamedTuple):
    """The row of one step, on the host.

    Attributes:
        record: The record of the step.
        refused: A scale given to `update()` as a tensor was out of bounds.
        update: The update that wrote it, counted as `RowCopies.updates`; None for a
            step that a graph has replayed.
    """

    record: StepRecord
    refused: bool
    update: int | None


class RowCopies:
    """Copies the rows of a device state to the host without waiting for the device.

    Attributes:
        updates: Updates of this process, added to those of a resumed run.
        lost: Rows that were overwritten before they were copied.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.lost = 0
        # Steps read so far; steps minus updates when they were last read.
        self._read = self._replayed = 0
        self._starts = 0
        # The update that started the copy not read yet; 0 for none.
        self._started = 0
        # The copy on the host, made once, and views of it: the counts and the ring.
        self._packed: Tensor | None = None
        self._views: tuple[Tensor, Tensor] | None = None
        # The pending copy: its event, or on devices without events a clone there.
        self._event: torch.cuda.Event | None = None
        self._there: Tensor | None = None

    def advance(self, state: DeviceState) -> list[HostRow]:
        """Count an update; return the rows that are due, in order, each exactly once.

        Waits only if a copy of LAG updates ago has not arrived. Must not be called
        while a graph is being captured or compiled.
        """
        if state.total.starts != self._starts:
            self._begin(state)
        self.updates += 1
        if self.updates % PERIOD == 0:
            self._start(state)
        elif self._started and self.updates == self._started + LAG:
            return self._finish()
        return []

    def drain(self, state: DeviceState) -> list[HostRow]:
        """Return all rows that were not read yet. Syncs."""
        if state.total.starts != self._starts:
            self._begin(state)
        rows = self._finish() if self._started else []
        self._start(state)
        return rows + self._finish()

    def _begin(self, state: DeviceState) -> None:
        """Restart at the counts of `state`; drop a pending copy."""
        if self._event is not None:
            self._wait(self._event)
        self._starts = state.total.starts
        self.updates = self._read = state.total.start
        self._replayed = self._started = 0

    def _start(self, state: DeviceState) -> None:
        self._started = self.updates
        kind = state.packed.device.type
        if self._packed is None:
            self._packed = torch.empty_like(
                state.packed, device="cpu", pin_memory=kind == "cuda"
            )
            self._views = split_packed(self._packed)
        if kind == "cuda":
            self._event = _start_copy(state.packed, self._packed)
        elif kind == "cpu":
            self._packed.copy_(state.packed)
        else:
            self._there = state.packed.clone()

    def _wait(self, event: torch.cuda.Event) -> None:
        if not event.query():
            event.synchronize()
        self._event = None

    def _finish(self) -> list[HostRow]:
        """Return the rows of the copy that was started last."""
        if self._event is not None:
            self._wait(self._event)
        assert self._packed is not None
        assert self._views is not None
        if self._there is not None:
            self._packed.copy_(self._there)
            self._there = None
        counts, ring = self._views
        steps = counts.tolist()[0]
        # Steps of replayed graphs have no update of their own on the host.
        replayed = steps - self._started
        # Otherwise it is unknown between which of these steps the replays took place.
        no_replays = replayed == self._replayed
        first = max(self._read, steps - RING)
        self.lost += first - self._read
        self._read, self._replayed, self._started = steps, replayed, 0
        begin, count = first % RING, steps - first
        if begin + count > RING:
            ring, begin = ring.roll(-begin, 0), 0
        found = []
        for step, values in enumerate(ring[begin : begin + count].tolist(), first + 1):
            row = DeviceRow(*values)
            update = step - replayed if no_replays or step == steps else None
            found.append(HostRow(row.record(step), row.refused != 0.0, update))
        return found


def _start_copy(source: Tensor, pinned: Tensor) -> torch.cuda.Event:
    pinned.copy_(source, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(source.device))
    return event
