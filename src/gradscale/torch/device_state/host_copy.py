"""Late, non-blocking reading of device facts."""

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradscale.torch.device_state import letters
from gradscale.torch.device_state.layout import (
    RING,
    Ledger,
    loss_at,
    row_at,
    updates_at,
)
from gradscale.torch.device_state.letters import (
    CALM_AT,
    NUMBERS,
    WORDS,
    LastFacts,
    Letter,
    numbers,
    serial,
)

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
class _Copy:
    """A copy of the ledger's sheet, where no kernel has written a letter.

    Attributes:
        sheet: Pinned on the host for CUDA, else where the ledger is.
        event: Recorded after the copy; None where a read itself waits.
        void, has_loss: As in a letter.
    """

    sheet: Tensor
    event: torch.cuda.Event | None
    void: bool = False
    has_loss: bool = False

    def read(self) -> LastFacts | None:
        if self.event is not None and not self.event.query():
            return None
        # One copy where it is not on the host yet.
        self.sheet = self.sheet.cpu()
        address = self.sheet.data_ptr()
        updates = updates_at(address)
        return updates, row_at(address, (updates - 1) % RING), loss_at(address)

    def wait(self) -> LastFacts:
        assert self.event is not None
        self.event.synchronize()
        found = self.read()
        assert found is not None
        return found

    def row(self, step: int) -> list[float]:
        return row_at(self.sheet.data_ptr(), step % RING)


class Mailbox:
    """Carries the rows of a ledger to the host without waiting for the device.

    >>> from gradscale.torch.device_state.layout import new_ledger
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
        self._posted: deque[Letter | _Copy] = deque()
        self._letters: list[Letter] = []
        self._copies: list[_Copy] = []
        self._sent = False
        # Updates that the host knows of, and letters it has not read.
        self._seen = 0
        self._unread = 0
        self._starts = 0
        weakref.finalize(self, _let_go, self._posted).atexit = False

    def clear(self) -> None:
        """Forget the facts that are on their way."""
        for post in self._posted:
            post.void = True

    def letter(self, ledger: Ledger) -> tuple[Letter, int]:
        """Return what a kernel writes the facts of the next update to, and post it.

        `exchange` then posts nothing else. Recall it if no kernel is started.

        Returns:
            The letter, and how many updates the host has heard of: later ones belong
            into it.
        """
        if ledger.total.starts != self._starts:
            self._begin_anew(ledger)
        if self._sent:
            # An error came between: nobody exchanged the one before.
            self._unread -= 1
            letters.lose([self._posted.pop()])
        free, known = self._letters, self._seen + self._unread
        letter = free.pop() if free else letters.fresh(ledger.sheet.device)
        letter.number = next(serial) % NUMBERS + 1
        letter.void = False
        self._posted.append(letter)
        self._unread += 1
        self._sent = True
        return letter, known

    def recall(self) -> None:
        """Take back the letter, if there is one, that no kernel is going to write."""
        if self._sent:
            self._sent = False
            self._unread -= 1
            unused = self._posted.pop()
            assert isinstance(unused, Letter)
            self._letters.append(unused)

    def calm(self, *, has_loss: bool) -> tuple[bytes, bool] | None:
        """Do what `exchange` would where it is about a step that is calm, in a moment.

        Args:
            has_loss: As for `exchange`.

        Returns:
            The facts of the update of `LAG` calls ago, for `letters.opened`, and
            whether its loss is known; None if it is not calm or not there yet. Then
            nothing is changed.
        """
        posted = self._posted
        if not self._sent or len(posted) != LAG + 1:
            return None
        post = posted[0]
        if not isinstance(post, Letter) or post.void:
            return None
        head = post.head.tobytes()
        if head[CALM_AT] < 128 or numbers(head).count(post.number) != WORDS:
            return None
        posted[-1].has_loss = has_loss
        posted.popleft()
        self._letters.append(post)
        self._unread -= 1
        self._seen += 1
        self._sent = False
        return head, post.has_loss

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
            self._begin_anew(ledger)
        posted = self._posted
        if not self._sent:
            posted.append(self._copy(ledger))
        self._sent = False
        posted[-1].has_loss = has_loss
        if len(posted) <= LAG:
            return None
        post = posted.popleft()
        updates, row, loss = post.read() or post.wait()
        if isinstance(post, Letter):
            self._unread -= 1
            self._letters.append(post)
        elif post.event is not None:
            self._copies.append(post)
        seen, self._seen = self._seen, updates
        if post.void or updates <= seen:
            return []
        last = LateRow(updates, row, loss if post.has_loss else None)
        return [last] if updates == seen + 1 else [*self._early(post, seen), last]

    def _early(self, post: Letter | _Copy, seen: int) -> Iterator[LateRow]:
        """Yield the rows between those that were seen and the last."""
        first = max(seen, self._seen - RING)
        self.lost += first - seen
        for step in range(first, self._seen - 1):
            yield LateRow(step + 1, post.row(step))

    def _begin_anew(self, ledger: Ledger) -> None:
        """Count from where the tally was set."""
        # What is dropped may still be written to. Torch keeps the memory of its own
        # copies until that is done.
        _let_go(self._posted)
        self._starts, self._seen = ledger.total.starts, ledger.total.start
        self._unread, self._sent = 0, False

    def _copy(self, ledger: Ledger) -> _Copy:
        sheet = ledger.sheet
        if sheet.device.type != "cuda":
            # On other devices the read itself waits, for values two steps old.
            return _Copy(sheet.clone(), None)
        # Free ones were read, and so were their copies waited for.
        copy = self._copies.pop() if self._copies else _pinned_copy(sheet)
        assert copy.event is not None
        copy.void = False
        copy.sheet.copy_(sheet, non_blocking=True)
        copy.event.record(torch.cuda.current_stream(sheet.device))
        return copy


def _pinned_copy(like: Tensor) -> _Copy:
    sheet = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
    return _Copy(sheet, torch.cuda.Event())


def _let_go(posted: deque[Letter | _Copy]) -> None:
    letters.lose(posted)
    posted.clear()
