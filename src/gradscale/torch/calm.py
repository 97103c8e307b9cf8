"""Steps in which nothing happened, put off until there are several of them."""

from collections.abc import Sequence
from time import monotonic

from gradscale.runfile import RunWriter
from gradscale.torch.ledger import calm
from gradscale.torch.mailbox import LateRow, late_row

# Judged together they take a third of the time: so many, and those of so many seconds.
STEPS = 64
SECONDS = 0.5


class Calm(list[LateRow | tuple[bytes, bool]]):
    """Keeps steps, rows or what `Mailbox.calm` returned, until it is time for all.

    Attributes:
        writer: Gets the row of each at once; None if nobody does.
        until: When it is time, if there are not `STEPS` of them before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writer: RunWriter | None = None
        self.until = 0.0

    def keeps(self, late: Sequence[LateRow] | None) -> bool:
        """Keep the step that is due, if it is calm; return whether it is."""
        if not late or len(late) > 1:
            return False
        found = calm(late[0].row)
        if found is None:
            return False
        if self.writer is not None:
            self.writer.step(late[0].step, *found, late[0].loss)
        self.append(late[0])
        return True

    def is_time(self) -> bool:
        """Return whether it is time to take all of them."""
        return len(self) >= STEPS or monotonic() >= self.until

    def take(self) -> list[LateRow]:
        """Return the steps that were kept, in order, and keep them no longer."""
        self.until = monotonic() + SECONDS
        kept = [one if isinstance(one, LateRow) else late_row(*one) for one in self]
        self.clear()
        return kept
