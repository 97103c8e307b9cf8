"""Which steps keep their details, so that a long run does not make a large file."""

from bisect import bisect_left
from collections.abc import Iterable

# Each of the two kinds of detailed steps keeps about this many rows of tensors:
# 1 million steps with 1000 tensors stay under 200 MB.
ROWS = 300_000
# With few tensors more steps would fit; nobody looks at so many.
MOST = 1000
# With very many tensors, fewer than this tell nothing.
LEAST = 8


def due(step: int, every: int) -> bool:
    """Return whether a step is one of those that are sampled.

    Multiples of `every`, and before the first of them powers of two, so that a short
    run has samples as well.

    >>> [step for step in range(1, 400) if due(step, 100)]
    [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    """
    return step % every == 0 or (0 < step < every and step & (step - 1) == 0)


def limit(tensors: int) -> int:
    """Return how many steps with details are kept.

    >>> limit(10), limit(1000), limit(1_000_000)
    (1000, 300, 8)
    """
    return max(LEAST, min(MOST, ROWS // max(tensors, 1)))


class Thinning:
    """Keeps a limited number of steps, the denser the more recent they are.

    What is dropped is the step whose neighbours lie closest together compared with
    its age. So the gaps grow in proportion to the age, a lonely step stays, and so do
    the first and the last one of many in a row.

    >>> kept = Thinning()
    >>> for step in range(1, 10_001):
    ...     _ = kept.add(step, limit=12)
    >>> kept.steps
    [1, 7820, 9204, 9676, 9834, 9928, 9970, 9992, 9996, 9998, 9999, 10000]

    Attributes:
        steps: The steps that are kept, ascending.
    """

    def __init__(self, steps: Iterable[int] = ()) -> None:
        self.steps = sorted(steps)

    def add(self, step: int, limit: int) -> list[int]:
        """Keep a step; return those to drop for it.

        Args:
            step: One that is kept already changes nothing.
            limit: How many may stay, at least 3.
        """
        place = bisect_left(self.steps, step)
        if self.steps[place : place + 1] != [step]:
            self.steps.insert(place, step)
        dropped = []
        while len(self.steps) > limit:
            dropped.append(self.steps.pop(self._least_missed()))
        return dropped

    def cut(self, step: int) -> None:
        """Forget a step and all after it."""
        self.steps = [kept for kept in self.steps if kept < step]

    def _least_missed(self) -> int:
        """Return the place of the step to drop; never the first or the last."""
        steps, newest = self.steps, self.steps[-1]
        ratios = [
            (after - before) / (newest - before)
            for before, after in zip(steps, steps[2:], strict=False)
        ]
        return ratios.index(min(ratios)) + 1
