"""The loss of a run over its steps, for a figure."""

import math
from collections.abc import Iterator
from typing import NamedTuple

# Pieces of a curve: about one for each pixel of a figure.
MOST_PIECES = 780


class Piece(NamedTuple):
    """The finite losses of some neighbouring steps.

    Attributes:
        step: The first step of the piece.
        mean: Their mean.
        low: The lowest.
        high: The highest.
    """

    step: int
    mean: float
    low: float
    high: float


class _Sum(NamedTuple):
    number: int
    total: float
    low: float
    high: float

    def joined(self, other: "_Sum") -> "_Sum":
        return _Sum(
            self.number + other.number,
            self.total + other.total,
            min(self.low, other.low),
            max(self.high, other.high),
        )


class LossCurve:
    """Collects losses in a bounded number of pieces of equally many steps.

    >>> curve = LossCurve()
    >>> for step in range(1, 2001):
    ...     curve.add(step, 1.0 / step)
    >>> pieces = list(curve.pieces())
    >>> curve.width, len(pieces), pieces[0].step, pieces[1].step
    (4, 500, 1, 5)

    Attributes:
        width: The number of steps of a piece; a power of two.
    """

    def __init__(self) -> None:
        self.width = 1
        self._first = 0
        self._sums: dict[int, _Sum] = {}

    def add(self, step: int, loss: float | None) -> None:
        """Add the loss of a step, if it is finite. Steps come in order."""
        if loss is None or not math.isfinite(loss):
            return
        if not self._sums:
            self._first = step
        place = (step - self._first) // self.width
        while place >= MOST_PIECES:
            self._double()
            place //= 2
        self._join(place, _Sum(1, loss, loss, loss))

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces that have a loss, in the order of steps."""
        for place, found in self._sums.items():
            step = self._first + place * self.width
            yield Piece(step, found.total / found.number, found.low, found.high)

    def _double(self) -> None:
        sums, self._sums = self._sums, {}
        self.width *= 2
        for place, found in sums.items():
            self._join(place // 2, found)

    def _join(self, place: int, found: _Sum) -> None:
        before = self._sums.get(place)
        self._sums[place] = found if before is None else before.joined(found)
