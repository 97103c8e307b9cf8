"""The scale and the verdicts of a run over its steps, and its phases."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from gradscale.core.records import Verdict
from gradscale.judge.trend import FALL, exponent
from gradscale.judge.verdict_table import BY_VERDICT

VERDICTS = tuple(Verdict)
_INDEX = {verdict: place for place, verdict in enumerate(VERDICTS)}
# Steps without the verdict that end a phase.
QUIET = 10
# The same for underflow, which is detected only in sampled steps: every 100th.
UNSAMPLED = 128
STEADY, FALLING = "steady", "falling"
# Bits by which a fallen scale must rise to end the fall.
RISEN = 2.0
_CALIBRATING = str(Verdict.CALIBRATING)


class Mark(NamedTuple):
    """A step whose verdict was not ok."""

    step: int
    log2: float
    verdict: Verdict


class Timeline:
    """The scale at every step, stored as its changes, and the steps not ok."""

    def __init__(self) -> None:
        self.first = 0
        self.last = 0
        self._steps = array("q")
        self._log2 = array("d")
        self._scale = -1.0
        self._mark_steps = array("q")
        self._mark_verdicts = array("B")
        self._mark_skips = array("B")

    def note(
        self, step: int, scale: float, verdict: Verdict, skipped: bool | None = None
    ) -> None:
        """Add one step; steps come in order.

        Args:
            step: Its number.
            scale: The scale that multiplied the loss.
            verdict: The verdict on the step.
            skipped: The step was skipped; None to derive it from the verdict.
        """
        if scale != self._scale:
            if not self._steps:
                self.first = step
            self._scale = scale
            self._steps.append(step)
            self._log2.append(exponent(scale))
        if verdict is not Verdict.OK:
            self._mark_steps.append(step)
            self._mark_verdicts.append(_INDEX[verdict])
            if skipped is None:
                skipped = BY_VERDICT[verdict].skipped
            self._mark_skips.append(skipped)
        self.last = step

    def at(self, step: int) -> float:
        """Return log2 of the scale at a step."""
        return self._log2[max(0, bisect_right(self._steps, step) - 1)]

    def changes(self) -> Iterator[tuple[int, float]]:
        """Yield the steps at which the scale changed, with its log2."""
        return zip(self._steps, self._log2, strict=True)

    def marks(self) -> Iterator[Mark]:
        """Yield all steps that were not ok."""
        for step, place in zip(self._mark_steps, self._mark_verdicts, strict=True):
            yield Mark(step, self.at(step), VERDICTS[place])

    def last_mark(self) -> Mark | None:
        """Return the last step that was not ok."""
        if not self._mark_steps:
            return None
        step = self._mark_steps[-1]
        return Mark(step, self.at(step), VERDICTS[self._mark_verdicts[-1]])

    def verdicts(self, steps: int) -> dict[Verdict, int]:
        """Return the number of steps with each verdict, in a run of `steps` steps."""
        counts = Counter(self._mark_verdicts)
        counts[_INDEX[Verdict.OK]] = steps - len(self._mark_verdicts)
        return {
            verdict: counts[place]
            for place, verdict in enumerate(VERDICTS)
            if counts[place]
        }

    def skips(self, first: int, last: int) -> int:
        """Return the number of skipped steps from `first` to `last`."""
        begin = bisect_left(self._mark_steps, first)
        end = bisect_right(self._mark_steps, last)
        return sum(self._mark_skips[begin:end])

    def falls(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the falls of the scale: the skip before each, and its lowest point.

        A fall is deeper than the swings of a healthy run and lasts until the scale has
        risen again.
        """
        peak, begin, lowest, end = -math.inf, first, math.inf, 0
        place = max(0, bisect_right(self._steps, first) - 1)
        stop = bisect_right(self._steps, last)
        changes = zip(self._steps[place:stop], self._log2[place:stop], strict=True)
        for step, log2 in changes:
            if end and log2 >= lowest + RISEN:
                yield begin, end
                peak, end = -math.inf, 0
            if log2 >= peak and not end:
                peak, begin, lowest = log2, 0, log2
                continue
            begin = begin or max(first, step - 1)
            lowest = min(lowest, log2)
            if peak - log2 >= FALL and lowest == log2:
                end = step
        if end:
            yield begin, end

    def range(self) -> tuple[float, float]:
        """Return the lowest and the highest log2 of the scale."""
        return min(self._log2), max(self._log2)

    def columns(self, width: int) -> list[tuple[float, float]]:
        """Return the lowest and highest log2 of the scale in `width` equal pieces."""
        span = self.last - self.first + 1
        edges = [self.first + span * column // width for column in range(width + 1)]
        pieces = []
        for begin, end in pairwise(edges):
            place = max(0, bisect_right(self._steps, begin) - 1)
            stop = max(place + 1, bisect_right(self._steps, max(begin, end - 1)))
            piece = self._log2[place:stop]
            pieces.append((min(piece), max(piece)))
        return pieces


@dataclass(kw_only=True)
class Phase:
    """A part of a run with uniform behaviour.

    Attributes:
        name: "steady", "falling" for the scale, or the verdict that dominates it.
        first: Its first step.
        last: Its last step.
        skipped: Steps among them that were skipped.
        scale_from: The scale at its beginning.
        scale_to: The scale at its end.
    """

    name: str
    first: int
    last: int
    skipped: int
    scale_from: float
    scale_to: float

    def as_dict(self) -> dict[str, Any]:
        """Return the phase as a JSON object."""
        return asdict(self)


def phases_of(timeline: Timeline) -> tuple[Phase, ...]:
    """Divide a run into phases.

    A phase of trouble has three or more steps of one verdict with fewer than ten other
    steps between two of them, or 128 for verdicts of sampled steps; skips directly
    before it belong to it. One step is enough for verdicts that depend on the steps
    before. Between these phases the scale falls, by more than the swings of a healthy
    run, or is steady. Calibration begins with the run.
    """
    if not timeline.last:
        return ()
    phases: list[Phase] = []
    begin = timeline.first
    for name, first, last in _stretches(timeline):
        first = max(first, begin)
        if name == _CALIBRATING and first <= timeline.first + QUIET:
            first = timeline.first
        if first > begin:
            phases += _untroubled(timeline, begin, first - 1)
        if last >= first:
            phases.append(_phase(timeline, name, first, last))
            begin = last + 1
    if begin <= timeline.last:
        phases += _untroubled(timeline, begin, timeline.last)
    return tuple(phases)


def _untroubled(timeline: Timeline, first: int, last: int) -> Iterator[Phase]:
    """Yield the phases between two phases of trouble."""
    for begin, end in timeline.falls(first, last):
        if begin > first:
            yield _phase(timeline, STEADY, first, begin - 1)
        yield _phase(timeline, FALLING, begin, end)
        first = end + 1
    if first <= last:
        yield _phase(timeline, STEADY, first, last)


def _stretches(timeline: Timeline) -> Iterator[tuple[str, int, int]]:
    """Yield name, first and last step of each phase of trouble."""
    verdict, first, last, steps = Verdict.OK, 0, 0, 0
    row_begin = before = -1
    for mark in timeline.marks():
        if mark.step != before + 1:
            row_begin = mark.step
        before = mark.step
        if not BY_VERDICT[mark.verdict].phase_after:
            continue
        quiet = UNSAMPLED if verdict is Verdict.UNDERFLOW else QUIET
        if mark.verdict is verdict and mark.step - last <= quiet:
            last, steps = mark.step, steps + 1
            continue
        if _lasting(verdict, steps):
            yield str(verdict), first, last
        verdict, first, last, steps = mark.verdict, row_begin, mark.step, 1
        # A phase directly after another one begins where that one ends.
        row_begin = mark.step
    if _lasting(verdict, steps):
        yield str(verdict), first, last


def _lasting(verdict: Verdict, steps: int) -> bool:
    return 0 < BY_VERDICT[verdict].phase_after <= steps


def _phase(timeline: Timeline, name: str, first: int, last: int) -> Phase:
    return Phase(
        name=name,
        first=first,
        last=last,
        skipped=timeline.skips(first, last),
        scale_from=2.0 ** timeline.at(first),
        scale_to=2.0 ** timeline.at(last),
    )
