"""Selects the steps whose details are kept, to bound the size of the file."""

from bisect import bisect_left
from collections.abc import Iterable

# Sampled steps and steps with an event each keep about this many rows of tensors:
# 1 million steps with 1000 tensors stay under 200 MB.
ROWS = 300_000
# With few tensors more steps would fit; plots do not resolve more.
MOST = 1000
# With very many tensors, fewer steps would show no trend.
LEAST = 8


def due(step: int, every: int) -> bool:
    """Return whether a step is sampled.

    Multiples of `every`, and below it powers of two, so that a short run has samples
    as well.

    >>> [step for step in range(1, 400) if due(step, 100)]
    [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    """
    return step % every == 0 or (0 < step < every and step & (step - 1) == 0)


def limit(tensors: int) -> int:
    """Return the number of steps whose details are kept.

    >>> limit(10), limit(1000), limit(1_000_000)
    (1000, 300, 8)
    """
    return max(LEAST, min(MOST, ROWS // max(tensors, 1)))


class Thinning:
    """Keeps a limited number of steps, the denser the more recent they are.

    The step to drop is the one whose neighbours are closest together relative to its
    age. So the gaps grow in proportion to the age, an isolated step stays, and so do
    the first and the last of many in a row.

    >>> kept = Thinning()
    >>> for step in range(1, 10_001):
    ...     _ = kept.add(step, limit=12)
    >>> kept.steps
    [1, 7820, 9204, 9676, 9834, 9928, 9970, 9992, 9996, 9998, 9999, 10000]

    Attributes:
        steps: The steps kept, ascending.
    """

    def __init__(self, steps: Iterable[int] = ()) -> None:
        self.steps = sorted(steps)

    def add(self, step: int, limit: int) -> list[int]:
        """Keep a step; return the steps to drop for it.

        Args:
            step: A step that is kept already changes nothing.
            limit: The number of steps to keep, at least 3.
        """
        index = bisect_left(self.steps, step)
        if self.steps[index : index + 1] != [step]:
            self.steps.insert(index, step)
        dropped = []
        while len(self.steps) > limit:
            dropped.append(self.steps.pop(self._densest()))
        return dropped

    def _densest(self) -> int:
        """Return the index of the step to drop; never the first or the last."""
        steps, newest = self.steps, self.steps[-1]
        ratios = [
            (after - before) / (newest - before)
            for before, after in zip(steps, steps[2:], strict=False)
        ]
        return ratios.index(min(ratios)) + 1
