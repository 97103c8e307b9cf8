"""Late, non-blocking reading of device facts."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.ledger import RING, Ledger

# A guard acts on the facts of exactly this many updates ago, so that every rank and
# every resumed run acts in the same call.
LAG = 2


class LateRow(NamedTuple):
    """The row of one step, on the host.

    Attributes:
        step: Which update this was, counted from 1.
        row: The facts, in the order of `ledger.ROW`.
    """

    step: int
    row: list[float]


@dataclass
class _Slot:
    """What was posted once.

    Attributes:
        ring, tally: Copies of the ledger's: pinned on the host for CUDA, else where
            the ledger is.
        arrived: Recorded after the copies; None where a read itself waits.
        void: The facts in it are forgotten.
    """

    ring: Tensor
    tally: Tensor
    arrived: torch.cuda.Event | None
    void: bool = False

    def read(self, place: int) -> tuple[int, list[float]]:
        """Return the count of updates and the row at one place of the ring."""
        row = self.ring[place]
        if self.arrived is not None:
            # Both are on the host: no operator needs to run.
            return self.tally.tolist()[0], row.tolist()
        # One list, f64 for the count's sake: elsewhere each list is a sync.
        count, *facts = torch.cat((self.tally[:1].double(), row.double())).tolist()
        return int(count), facts


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

    def exchange(self, ledger: Ledger) -> list[LateRow] | None:
        """Post the ledger's rows; return those due, in order, each exactly once.

        Due is every step up to the update of `LAG` calls ago: that one alone, unless
        a graph was replayed in between, whose steps the host did not see. Waits only
        if those facts have not arrived yet. Not for use while a graph is being
        captured or compiled.

        Returns:
            None before there was such an update.
        """
        if ledger.total.starts != self._starts:
            # The tally was set: steps are counted anew. What is dropped may still be
            # written to; torch keeps pinned memory until that is done.
            self._posted.clear()
            self._starts, self._seen = ledger.total.starts, ledger.total.start
        self._posted.append(self._post(ledger))
        if len(self._posted) <= LAG:
            return None
        slot = self._posted.popleft()
        if slot.arrived is not None:
            if not slot.arrived.query():
                slot.arrived.synchronize()
            self._free.append(slot)
        return self._read(slot)

    def _post(self, ledger: Ledger) -> _Slot:
        ring, tally = ledger.ring, ledger.total.tally
        if ring.device.type != "cuda":
            # On other devices the read itself waits, for values two steps old.
            return _Slot(ring.clone(), tally.clone(), None)
        # Free slots were read, and so were their copies waited for.
        slot = self._free.pop() if self._free else _pinned_slot(ledger)
        assert slot.arrived is not None
        slot.void = False
        slot.ring.copy_(ring, non_blocking=True)
        slot.tally.copy_(tally, non_blocking=True)
        slot.arrived.record(torch.cuda.current_stream(ring.device))
        return slot

    def _read(self, slot: _Slot) -> list[LateRow]:
        seen = self._seen
        updates, row = slot.read(seen % RING)
        self._seen = updates
        if slot.void or updates <= seen:
            return []
        if updates == seen + 1:
            return [LateRow(updates, row)]
        first = max(seen, updates - RING)
        self.lost += first - seen
        ring = slot.ring.tolist()
        return [LateRow(s + 1, ring[s % RING]) for s in range(first, updates)]


def _pinned_slot(ledger: Ledger) -> _Slot:
    ring, tally = (
        torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
        for like in (ledger.ring, ledger.total.tally)
    )
    return _Slot(ring, tally, torch.cuda.Event())
