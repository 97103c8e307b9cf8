"""Steps in which nothing happened, put off until there are several of them."""

from collections.abc import Iterator, Sequence
from threading import Lock
from time import time
from typing import NamedTuple

from gradscale.runfile import RunWriter
from gradscale.runfile.tables import StepTuple
from gradscale.torch.device_state.host_copy import LateRow
from gradscale.torch.device_state.layout import calm
from gradscale.torch.device_state.letters import opened

# Judged together they take a third of the time: so many, and those of so many seconds.
STEPS = 64
SECONDS = 0.5


class _Row(NamedTuple):
    """A row that has been opened, and when it came."""

    late: LateRow
    time: float


# What `Mailbox.calm` returned, and when; or a row.
Kept = _Row | tuple[bytes, bool, float]


class Calm(list[Kept]):
    """Keeps steps until it is time for all of them. Appending takes no lock.

    Only what they mean can wait: a run that is killed must find its rows. So the thread
    that writes the file asks for them before each commit.

    Attributes:
        until: When it is time, if there are not `STEPS` of them before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.until = 0.0
        self._writer: RunWriter | None = None
        self._lock = Lock()
        self._written = 0

    def write_to(self, writer: RunWriter | None) -> None:
        """Hand the rows to a writer, which may also ask for them."""
        self._writer = writer
        if writer is not None:
            writer.ask(self._hand_over)

    def keeps(self, late: Sequence[LateRow] | None) -> bool:
        """Keep the step that is due, if it is calm; return whether it is."""
        if not late or len(late) > 1 or calm(late[0].row) is None:
            return False
        self.append(_Row(late[0], time()))
        return True

    def is_time(self) -> bool:
        """Return whether it is time to take all of them."""
        return len(self) >= STEPS or time() >= self.until

    def take(self) -> list[LateRow]:
        """Return the steps that were kept, in order, and keep them no longer."""
        self.until = time() + SECONDS
        if not self:
            return []
        self._hand_over()
        with self._lock:
            kept = [_opened(one).late for one in self]
            self.clear()
            self._written = 0
        return kept

    def _hand_over(self) -> None:
        """Hand over the rows that were not; from whatever thread, in order."""
        if self._writer is not None:
            with self._lock:
                new = self[self._written :]
                self._writer.rows(_rows_of(new))
                self._written += len(new)


def _opened(one: Kept) -> _Row:
    if isinstance(one, _Row):
        return one
    head, has_loss, when = one
    step, row, loss = opened(head)
    return _Row(LateRow(step, row, loss if has_loss else None), when)


def _rows_of(kept: Sequence[Kept]) -> Iterator[StepTuple]:
    for (step, row, loss), when in map(_opened, kept):
        columns = calm(row)
        assert columns is not None
        yield step, when, *columns, loss
