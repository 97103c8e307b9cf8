"""Tables of pointers: how one launch reaches thousands of tensors.

A table is an i64 matrix on the device with a column for each tensor: how many elements
it has, the first of its chunks, then one row of addresses for each list. A program of a
launch works on one chunk; `owners` tells it whose chunk that is.
"""

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# Rows of a table before the addresses.
NUMEL, FIRST, ADDRESSES = 0, 1, 2
# Staging slots that are made at once, one of them for a graph that is captured later.
SLOTS = 4
# What captured graphs read when they are replayed. A graph may outlive whoever was
# captured, so this lives as long as the process; it is some kilobytes for each capture.
_of_graphs: list[Tensor] = []


class Table(NamedTuple):
    """What a kernel is given.

    Attributes:
        cells: i64[ADDRESSES + lists, tensors].
        owners: i32[chunks], the column of each chunk.
        tensors: How many columns there are.
        chunks: How many programs a launch needs.
        most: How many chunks the largest tensor has.
    """

    cells: Tensor
    owners: Tensor
    tensors: int
    chunks: int
    most: int


class Staging:
    """Pinned memory through which tables travel, reused once a copy has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._fresh: list[tuple[Tensor, torch.cuda.Event]] = []

    def send(self, numbers: array, to: Tensor, *, captured: bool) -> None:
        """Copy the numbers into `to` without waiting.

        Args:
            numbers: Of type "q", as many as `to` has elements.
            to: i64[...], on the device.
            captured: A graph records the copy and repeats it: the slot is its own.
        """
        if self._device.type != "cuda":
            to.copy_(torch.frombuffer(numbers, dtype=torch.int64).view_as(to))
            return
        size = to.numel()
        slot, done = self._fresh_slot(size) if captured else self._free_slot(size)
        # A plain copy: no operator runs, each of which takes some microseconds.
        ctypes.memmove(slot.data_ptr(), numbers.buffer_info()[0], slot.itemsize * size)
        to.copy_(slot[:size].view_as(to), non_blocking=True)
        if captured:
            _of_graphs.append(slot)
        else:
            done.record(torch.cuda.current_stream(self._device))
            self._slots.append((slot, done))

    def _free_slot(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """Return a slot that no copy reads any more."""
        for _ in range(len(self._slots)):
            slot, done = self._slots.popleft()
            if slot.numel() < size:
                continue
            if done.query():
                return slot, done
            self._slots.append((slot, done))
        self._fresh = [one for one in self._fresh if one[0].numel() >= size]
        if len(self._fresh) < 2:
            self._fresh += [_new_slot(size) for _ in range(SLOTS)]
        return self._fresh.pop()

    def _fresh_slot(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """Return a slot that was never used: a capture may not ask for events."""
        while self._fresh:
            slot, done = self._fresh.pop()
            if slot.numel() >= size:
                return slot, done
        return _new_slot(size)


def _new_slot(size: int) -> tuple[Tensor, torch.cuda.Event]:
    slot = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
    return slot, torch.cuda.Event()


class _Head(NamedTuple):
    """The rows before the addresses.

    Attributes:
        numels: Whose they are.
        cells: The rows, one after the other.
        chunks: How many chunks there are.
        most: How many the largest tensor has.
    """

    numels: Sequence[int]
    cells: array
    chunks: int
    most: int


def _head_of(numels: Sequence[int], chunk: int) -> _Head:
    counts = [-(-numel // chunk) for numel in numels]
    firsts = [0, *accumulate(counts)]
    chunks = firsts.pop()
    cells = array("q", [*numels, *firsts])
    return _Head(numels, cells, chunks, max(counts, default=0))


class TableCache:
    """One table, rebuilt only where an address or a size has changed."""

    def __init__(self, device: torch.device, chunk: int) -> None:
        self._device = device
        self._chunk = chunk
        self._staging = Staging(device)
        self._numels: Sequence[int] = []
        self._rows: Sequence[Sequence[int]] = []
        self._head = _head_of([], chunk)
        self._table: Table | None = None
        self._frozen = False

    def of(self, numels: Sequence[int], rows: Sequence[Sequence[int]]) -> Table:
        """Return the table of these tensors. No host sync.

        Args:
            numels: How many elements each tensor has, at least one.
            rows: For each list, the addresses of its tensors; best as `Numbers`.
        """
        captured = capturing(self._device)
        table = self._table
        if table is None or numels != self._numels or rows != self._rows:
            if captured:
                # Only a replay fills it: nobody else may use it.
                return self._made(numels, rows, None, captured=True)
            row = None if table is None else self._lone_change(numels, rows)
            if table is not None and row is not None:
                to = table.cells[ADDRESSES + row]
                self._staging.send(array("q", rows[row]), to, captured=False)
            else:
                table = self._made(numels, rows, table, captured=False)
            self._numels, self._rows, self._table = numels, rows, table
            self._frozen = False
        if captured and not self._frozen:
            # The graph reads this memory at each replay: it is never written again.
            _of_graphs.extend((table.cells, table.owners))
            self._frozen = True
        return table

    def _lone_change(
        self, numels: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> int | None:
        """Return the only row that has changed, if no graph reads the table.

        In most runs, that of the gradients in each step.
        """
        if self._frozen or numels != self._numels or len(rows) != len(self._rows):
            return None
        pairs = enumerate(zip(rows, self._rows, strict=True))
        changed = [place for place, (row, old) in pairs if row != old]
        return changed[0] if len(changed) == 1 else None

    def _made(
        self,
        numels: Sequence[int],
        rows: Sequence[Sequence[int]],
        old: Table | None,
        *,
        captured: bool,
    ) -> Table:
        if numels != self._head.numels:
            self._head = _head_of(numels, self._chunk)
        numbers, chunks = self._head.cells[:], self._head.chunks
        for row in rows:
            numbers.extend(row)
        shape = (ADDRESSES + len(rows), len(numels))
        if old is not None and old.cells.shape == shape and not self._frozen:
            cells = old.cells
        else:
            cells = torch.empty(shape, dtype=torch.int64, device=self._device)
        self._staging.send(numbers, cells, captured=captured)
        if old is not None and numels == self._numels:
            owners = old.owners
        else:
            owners = torch.empty(chunks, dtype=torch.int32, device=self._device)
            fill_owners_(owners, cells, len(numels))
        if captured:
            _of_graphs.extend((cells, owners))
        return Table(cells, owners, len(numels), chunks, self._head.most)


def fill_owners_(owners: Tensor, cells: Tensor, tensors: int) -> None:
    """Write the column of each chunk. No host sync."""
    firsts = cells[FIRST]
    chunks = torch.arange(owners.numel(), device=owners.device)
    # The last column that begins at or before the chunk.
    owners.copy_(torch.searchsorted(firsts, chunks, right=True) - 1)


def keep_for_graphs(memory: Tensor) -> None:
    """Keep what a graph reads that is being captured; it is not to be changed."""
    _of_graphs.append(memory)


def capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured on this device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
