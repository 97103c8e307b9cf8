"""Builds `scaler.last` and the step counters from the per-optimizer state."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gradscale.core.formatting import power
from gradscale.core.outcome import StepOutcome
from gradscale.core.records import StepRecord
from gradscale.torch.device_state.layout import DeviceRow, StepTotals
from gradscale.torch.step.optimizer_step import OptimizerStep


class StepCount(int):
    """A count over all optimizers; indexing it gives the count of one.

    >>> adam, sgd = object(), object()
    >>> count = StepCount(3, {id(adam): 2, id(sgd): 1})
    >>> count + 1, count[adam]
    (4, 2)
    """

    _each: Mapping[int, int]

    def __new__(cls, total: int, each: Mapping[int, int]) -> "StepCount":
        count = super().__new__(cls, total)
        count._each = each
        return count

    def __getitem__(self, optimizer: Any) -> int:
        """Return the count of one optimizer; 0 before its first step."""
        return self._each.get(id(optimizer), 0)


def postfix(scale: float, skipped: int, updates: int) -> str:
    """Return the scale and the skips in a few characters.

    >>> postfix(2.0**14, 3, 4182)
    'S=2^14 skipped 3/4182'
    """
    return f"S={power(scale)} skipped {skipped}/{updates}"


def outcome_of(
    total: StepTotals,
    each: Mapping[int, StepTotals],
    settled: Mapping[int, OptimizerStep],
) -> StepOutcome:
    """Return the outcome of the last update. No host sync.

    Args:
        total: The totals of all optimizers together.
        each: Those of each optimizer.
        settled: The steps that the last update closed.
    """
    parts = {
        key: _outcome(each[key], [step]) for key, step in settled.items() if key in each
    }
    return _outcome(total, list(settled.values()), parts)


def _outcome(
    totals: StepTotals,
    steps: Sequence[OptimizerStep],
    parts: Mapping[int, StepOutcome] | None = None,
) -> StepOutcome:
    # Copies: the next update writes into the same tensors.
    row, counts = totals.row.clone(), totals.counts.clone()

    def culprits() -> tuple[str, ...]:
        return tuple(name for step in steps for name in step.culprits())

    return StepOutcome(
        lambda: DeviceRow(*row.tolist()).record(counts.tolist()[0]), culprits, parts
    )


def count_of(
    total: StepTotals, each: Mapping[int, StepTotals], place: int
) -> StepCount:
    """Return one kind of count: 0 applied, 1 skipped. Syncs."""
    steps = {key: totals.applied_and_skipped()[place] for key, totals in each.items()}
    return StepCount(total.applied_and_skipped()[place], steps)


class DisabledCounter:
    """Counts the steps of a disabled scaler: each one is taken."""

    def __init__(self) -> None:
        self._updates = 0
        self._steps: Counter[int] = Counter()
        self._open: set[int] = set()
        self._closed: set[int] = set()

    def step(self, optimizer: Any) -> None:
        """Count one step."""
        self._steps[id(optimizer)] += 1
        self._open.add(id(optimizer))

    def update(self) -> None:
        """End the iteration, if there was one."""
        if self._open:
            self._updates += 1
            self._closed, self._open = self._open, set()

    def applied(self) -> StepCount:
        """Return the number of updates, and of the steps of each optimizer."""
        return StepCount(self._updates, dict(self._steps))

    def outcome(self) -> StepOutcome | None:
        """Return the outcome of the last update; None before the first."""
        if not self._updates:
            return None
        record = StepRecord(self._updates, scale=1.0, applied=True, finite=True)
        parts = {key: StepOutcome(lambda: record, tuple) for key in self._closed}
        return StepOutcome(lambda: record, tuple, parts)
