"""Steps in which nothing happened, put off until there are several of them."""

import time

from gradscale.torch.mailbox import LateRow

# Judged together they take a third of the time: so many, and those of so many seconds.
STEPS = 64
SECONDS = 0.5


class Calm:
    """Keeps steps until it is time for all of them."""

    def __init__(self) -> None:
        self._late: list[LateRow] = []
        self._since = 0.0

    def add(self, late: LateRow) -> bool:
        """Keep a step; return whether it is time to take all."""
        self._late.append(late)
        return len(self._late) >= STEPS or time.monotonic() - self._since >= SECONDS

    def take(self) -> list[LateRow]:
        """Return the steps that were kept, in order, and keep them no longer."""
        self._since = time.monotonic()
        late, self._late = self._late, []
        return late
