"""Pointer tables, by which one launch processes thousands of tensors.

A table is an i64 matrix on the device with a column for each tensor: its number of
elements, the index of its first chunk, then one row of addresses for each list. Each
program of a launch processes one chunk; `owners` holds the column of each chunk.
"""

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.kernels import capturing
from gradscale.torch.tensor_list import GradSnapshot, Numbers, addresses, numbers

# Rows of a table: the number of elements, the first chunk, then the addresses.
FIRST, ADDRESSES = 1, 2
# Staging slots that are allocated together, one of them for a later capture.
SLOTS = 4
KERNEL_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
# Memory that captured graphs read when they are replayed. A graph may outlive the
# object that was captured, so this is never freed: some kilobytes for each capture.
_of_graphs: list[Tensor] = []


class Table(NamedTuple):
    """The pointer table that a kernel takes.

    Attributes:
        cells: i64[ADDRESSES + lists, tensors].
        owners: i32[chunks], the column of each chunk.
        tensors: The number of columns.
        chunks: The number of programs of a launch.
        most: The number of chunks of the largest tensor.
    """

    cells: Tensor
    owners: Tensor
    tensors: int
    chunks: int
    most: int


class Layout(NamedTuple):
    """Addresses and sizes of the tensors of some lists, at one moment.

    Attributes:
        rows: For each list, the addresses of its tensors; last those of the step
            counts, if there are any.
        numels: The number of elements of each tensor of the first list.
        same_sizes: At each position, the tensors of all lists have equal sizes.
        contiguous: All tensors are contiguous.
    """

    rows: list[Numbers]
    numels: Numbers
    same_sizes: bool
    contiguous: bool


def layout_of(
    lists: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor] = (),
    grads: GradSnapshot | None = None,
) -> Layout:
    """Return the layout of some lists, in three passes over each.

    Args:
        lists: Parameters first, gradients second, then state.
        steps: f32[] each, step counts for one more row.
        grads: A snapshot of the second list, all of one kind: it is not read again.
    """
    rows: list[Numbers] = []
    sizes: list[Numbers] = []
    contiguous = True
    # List by list: its tensors stay in the cache for the next pass.
    for i, one in enumerate(lists):
        if i == 1 and grads is not None:
            rows.append(grads.addresses)
            sizes.append(grads.numels)
            continue
        rows.append(addresses(one))
        sizes.append(numbers(map(Tensor.numel, one)))
        contiguous = contiguous and all(map(Tensor.is_contiguous, one))
    if steps:
        rows.append(addresses(steps))
    return Layout(rows, sizes[0], all(n == sizes[0] for n in sizes), contiguous)


class Staging:
    """Pinned memory for copies to the device, reused once a copy has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._fresh: list[tuple[Tensor, torch.cuda.Event]] = []

    def send(self, numbers: array, to: Tensor, *, captured: bool) -> None:
        """Copy the numbers into `to` without waiting.

        Args:
            numbers: Of type "q", as many as `to` has elements.
            to: i64[...], on the device.
            captured: A graph records the copy and repeats it: its slot is not reused.
        """
        if self._device.type != "cuda":
            to.copy_(torch.frombuffer(numbers, dtype=torch.int64).view_as(to))
            return
        size = to.numel()
        slot, done = self._fresh_slot(size) if captured else self._free_slot(size)
        # By memmove: an operator of torch takes some microseconds.
        ctypes.memmove(slot.data_ptr(), numbers.buffer_info()[0], slot.itemsize * size)
        to.copy_(slot[:size].view_as(to), non_blocking=True)
        if captured:
            _of_graphs.append(slot)
        else:
            done.record(torch.cuda.current_stream(self._device))
            self._slots.append((slot, done))

    def _free_slot(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """Return a slot whose copy has ended, or a new one."""
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
        """Return an unused slot: events must not be queried during a capture."""
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
        numels: The sizes of the tensors.
        cells: The rows, concatenated.
        chunks: The number of chunks.
        most: The number of chunks of the largest tensor.
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


class PointerTable:
    """One table, kept from step to step; only rows that changed are sent again.

    Args:
        device: The device of all tensors.
        chunk: The number of elements that a program processes.
    """

    def __init__(self, device: torch.device, chunk: int) -> None:
        self._device = device
        self._chunk = chunk
        self._staging = Staging(device)
        self._numels: Sequence[int] = []
        self._rows: Sequence[Sequence[int]] = []
        self._head = _head_of([], chunk)
        self._table: Table | None = None
        # A captured graph reads the table.
        self._frozen = False

    def of(self, numels: Sequence[int], rows: Sequence[Sequence[int]]) -> Table:
        """Return the table of these tensors. No host sync.

        Args:
            numels: The number of elements of each tensor, at least one.
            rows: For each list, the addresses of its tensors; fastest as `Numbers`.
        """
        captured = capturing(self._device)
        table = self._table
        if table is None or numels != self._numels or rows != self._rows:
            if captured:
                # Filled by a replay only: no other launch may use it.
                return self._made(numels, rows, None, captured=True)
            row = None if table is None else self._only_changed_row(numels, rows)
            if table is not None and row is not None:
                to = table.cells[ADDRESSES + row]
                self._staging.send(array("q", rows[row]), to, captured=False)
            else:
                table = self._made(numels, rows, table, captured=False)
            self._numels, self._rows, self._table = numels, rows, table
            self._frozen = False
        if captured and not self._frozen:
            # Each replay reads this memory: it is not written again.
            _of_graphs.extend((table.cells, table.owners))
            self._frozen = True
        return table

    def of_lists(
        self, lists: Sequence[Sequence[Tensor]], layout: Layout
    ) -> tuple[Table | None, list[int]]:
        """Return the table of the processable tensors, and the remaining positions.

        A kernel processes the tensors of one parameter in the order of their memory,
        so all of them need the same order and no gaps. No host sync.

        Args:
            lists: Parameters first, gradients second, then state; at each position the
                tensors of one parameter.
            layout: That of the lists, and of step counts if there are any.
        """
        rows, numels = layout.rows, layout.numels
        # Gradients may be in new memory in every step; the others rarely are.
        known = numels == self._numels and _without_grads(rows) == _without_grads(
            self._rows
        )
        if known and layout.same_sizes and layout.contiguous:
            return self.of(numels, rows), []
        rest = _unprocessable(lists)
        if rest:
            left_out = set(rest)
            numels, *rows = (
                numbers(value for i, value in enumerate(row) if i not in left_out)
                for row in (numels, *rows)
            )
        return (self.of(numels, rows) if numels else None), rest

    def _only_changed_row(
        self, numels: Sequence[int], rows: Sequence[Sequence[int]]
    ) -> int | None:
        """Return the only row that has changed, if no graph reads the table.

        In most runs, that of the gradients in each step.
        """
        if self._frozen or numels != self._numels or len(rows) != len(self._rows):
            return None
        pairs = enumerate(zip(rows, self._rows, strict=True))
        changed = [i for i, (row, old) in pairs if row != old]
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
    """Keep memory that a graph under capture reads; it must not be changed."""
    _of_graphs.append(memory)


def _without_grads(rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return [*rows[:1], *rows[2:]]


def _unprocessable(lists: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return the positions of the parameters that a kernel cannot process."""
    kinds = [(one[0].dtype, one[0].device) for one in lists]
    return [
        i
        for i, tensors in enumerate(zip(*lists, strict=True))
        if tensors[0].numel() == 0 or not _same_order(tensors, kinds)
    ]


def _same_order(
    tensors: Sequence[Tensor], kinds: Sequence[tuple[torch.dtype, torch.device]]
) -> bool:
    """Return whether the values are in memory in the same order, without gaps."""
    # Assigning `.data` may change the dtype and the device too.
    if [(tensor.dtype, tensor.device) for tensor in tensors] != list(kinds):
        return False
    first = tensors[0]
    if any(tensor.shape != first.shape or tensor.is_neg() for tensor in tensors):
        return False
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    same = all(tensor.stride() == first.stride() for tensor in tensors)
    return same and is_dense(first)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory, each address once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
