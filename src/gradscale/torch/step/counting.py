"""Counts of applied and skipped steps, and how a progress bar shows them."""

from collections.abc import Mapping
from typing import Any

from gradscale.core.formatting import power


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
