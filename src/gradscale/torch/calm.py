"""Steps in which nothing happened, put off until there are several of them."""

import time

from gradscale.core.verdicts import StepRecord

# Judged together they take a third of the time: so many, and those of so many seconds.
STEPS = 64
SECONDS = 0.5


class Calm:
    """Keeps steps until it is time for all of them."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._since = 0.0

    def add(self, record: StepRecord) -> bool:
        """Keep a step; return whether it is time to take all."""
        self._records.append(record)
        return len(self._records) >= STEPS or time.monotonic() - self._since >= SECONDS

    def take(self) -> list[StepRecord]:
        """Return the steps that were kept, in order, and keep them no longer."""
        self._since = time.monotonic()
        records, self._records = self._records, []
        return records
