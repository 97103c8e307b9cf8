"""Late, non-blocking reading of device facts."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.ledger import RING, Ledger, loss_at, row_at, updates_at

# A guard acts on the facts of exactly this many updates ago, so that every rank and
# every resumed run acts in the same call.
LAG = 2


class LateRow(NamedTuple):
    """The row of one step, on the host.

    Attributes:
        step: Which update this was, counted from 1.
        row: The facts, in the order of `ledger.ROW`.
        loss: The sum of the losses behind it; None if they are not known.
    """

    step: int
    row: list[float]
    loss: float | None = None


@dataclass
class _Slot:
    """What was posted once.

    Attributes:
        sheet: A copy of the ledger's: pinned on the host for CUDA, else where the
            ledger is.
        arrived: Recorded after the copy; None where a read itself waits.
        void: The facts in it are forgotten.
        has_loss: The loss in it is that of the last step.
    """

    sheet: Tensor
    arrived: torch.cuda.Event | None
    void: bool = False
    has_loss: bool = False


class Mailbox:
    """Carries the rows of a ledger to the host without waiting for the device.

    >>> from gradscale.torch.ledger import new_ledger
    >>> ledger, box = new_ledger(torch.device("cpu"), 8.0), Mailbox()
    >>> def steps(count):
    ...     ledger.total.tally[0].add_(count)
    >>> steps(1), box.exchange(ledger)
    (None, None)
    >>> steps(3), box.exchange(ledger)
    (None, None)
    >>> steps(1), [late.step for late in box.exchange(ledger)]
    (None, [1])
    >>> steps(1), [late.step for late in box.exchange(ledger)]
    (None, [2, 3, 4])

    Attributes:
        lost: How many rows were overwritten before the host looked.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._posted: deque[_Slot] = deque()
        self._free: list[_Slot] = []
        self._seen = 0
        self._starts = 0

    def clear(self) -> None:
        """Forget the facts that are on their way."""
        for slot in self._posted:
            slot.void = True

    def exchange(
        self, ledger: Ledger, *, has_loss: bool = False
    ) -> list[LateRow] | None:
        """Post the ledger's rows; return those due, in order, each exactly once.

        Due is every step up to the update of `LAG` calls ago: that one alone, unless
        a graph was replayed in between, whose steps the host did not see. Waits only
        if those facts have not arrived yet. Not for use while a graph is being
        captured or compiled.

        Args:
            ledger: Of which the rows are.
            has_loss: Its loss is known, and of the last step.

        Returns:
            None before there was such an update.
        """
        if ledger.total.starts != self._starts:
            # The tally was set: steps are counted anew. What is dropped may still be
            # written to; torch keeps pinned memory until that is done.
            self._posted.clear()
            self._starts, self._seen = ledger.total.starts, ledger.total.start
        self._posted.append(self._post(ledger))
        self._posted[-1].has_loss = has_loss
        if len(self._posted) <= LAG:
            return None
        slot = self._posted.popleft()
        if slot.arrived is not None:
            if not slot.arrived.query():
                slot.arrived.synchronize()
            self._free.append(slot)
        return self._read(slot)

    def _post(self, ledger: Ledger) -> _Slot:
        sheet = ledger.sheet
        if sheet.device.type != "cuda":
            # On other devices the read itself waits, for values two steps old.
            return _Slot(sheet.clone(), None)
        # Free slots were read, and so were their copies waited for.
        slot = self._free.pop() if self._free else _pinned_slot(sheet)
        assert slot.arrived is not None
        slot.void = False
        slot.sheet.copy_(sheet, non_blocking=True)
        slot.arrived.record(torch.cuda.current_stream(sheet.device))
        return slot

    def _read(self, slot: _Slot) -> list[LateRow]:
        # One copy where it is not on the host yet.
        sheet = slot.sheet.cpu() if slot.arrived is None else slot.sheet
        address = sheet.data_ptr()
        seen, updates = self._seen, updates_at(address)
        self._seen = updates
        if slot.void or updates <= seen:
            return []
        first = max(seen, updates - RING)
        self.lost += first - seen
        early = [
            LateRow(step + 1, row_at(address, step % RING))
            for step in range(first, updates - 1)
        ]
        loss = loss_at(address) if slot.has_loss else None
        last = row_at(address, (updates - 1) % RING)
        return [*early, LateRow(updates, last, loss)]


def _pinned_slot(like: Tensor) -> _Slot:
    sheet = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
    return _Slot(sheet, torch.cuda.Event())
