"""Non-finite tensors and modules of a run, from its events and peaks."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gradscale.judge.observations import Place, place_of
from gradscale.runfile import EventRow, Run

# Limits on the data of an event from an untrusted file. A recorder lists 20 names.
MOST_NAMES = 1000
MOST_TENSORS = 100_000


@dataclass(kw_only=True)
class Culprit:
    """One tensor that was not finite, over a whole run.

    Attributes:
        name: The dotted name of the parameter.
        steps: Steps in which it was not finite.
        first_in: Steps among them in which it was the first.
        nan: Steps among them in which it was NaN, as far as peaks were recorded.
        first: The first such step.
        last: The last such step.
    """

    name: str
    steps: int = 0
    first_in: int = 0
    nan: int = 0
    first: int = 0
    last: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the culprit as a JSON object."""
        return asdict(self)


class NonfiniteTensors(NamedTuple):
    """The tensors that were not finite in one step.

    Attributes:
        names: In the order in which they were recorded.
        nan: Those that were NaN, as far as peaks were recorded.
        number: Their number; `names` may be truncated.
    """

    names: tuple[str, ...]
    nan: frozenset[str]
    number: int

    @property
    def counted(self) -> tuple[str, ...]:
        """The names, padded with empty ones to `number`."""
        return self.names + ("",) * (self.number - len(self.names))


NO_TENSORS = NonfiniteTensors((), frozenset(), 0)


class Culprits:
    """Looks up and counts the non-finite tensors of each step.

    Args:
        run: Its peaks are read on demand.

    Attributes:
        places: The locations that module hooks observed, in order.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._peaks: set[int] = set()
        self._named: dict[int, tuple[tuple[str, ...], int]] = {}
        self._blamed: tuple[tuple[str, ...], int] = ((), 0)
        self.places: list[Place] = []
        self._counts: dict[str, Culprit] = {}

    def add(self, events: Iterable[EventRow]) -> None:
        """Add the next events of the run, in order."""
        self._peaks = set(self._run.peak_steps())
        for event in events:
            self._add(event)

    def at(self, step: int, *, weights: bool = False) -> NonfiniteTensors:
        """Return and count the tensors that were not finite in a skipped step.

        Steps come in order. If no event names the tensors, they are those of the step
        before: events are written only when the tensors change.

        Args:
            step: Its number.
            weights: Weights were not finite. The peaks, of gradients, are then
                ignored.
        """
        if step in self._named:
            self._blamed = self._named[step]
        named, count = self._blamed
        peaks = self._run.peaks(step) if step in self._peaks else {}
        bad = tuple(name for name, peak in peaks.items() if not math.isfinite(peak))
        nan = frozenset(name for name in bad if math.isnan(peaks[name]))
        if bad and not (weights and named):
            # Events list tensors in the order of backward; peaks have all of them.
            first = tuple(name for name in named if name in bad)
            named = first + tuple(name for name in bad if name not in first)
            count = len(named)
        names = named
        if not names:
            return NO_TENSORS
        for index, name in enumerate(names):
            culprit = self._counts.setdefault(name, Culprit(name=name, first=step))
            culprit.steps += 1
            culprit.first_in += index == 0
            culprit.nan += name in nan
            culprit.last = step
        return NonfiniteTensors(names, nan, count)

    def top(self) -> tuple[Culprit, ...]:
        """Return all culprits, the most frequent first."""
        ranked = sorted(
            self._counts.values(),
            key=lambda each: (-each.first_in, -each.steps, each.first, each.name),
        )
        return tuple(ranked)

    def _add(self, event: EventRow) -> None:
        if event.step is None:
            return
        data = event.data if isinstance(event.data, Mapping) else {}
        place = place_of(event.step, data)
        if place is not None:
            self.places.append(place)
            return
        names = data.get("culprits")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            names = names[:MOST_NAMES]
            count = _count(data, "count") or 0
            self._named[event.step] = (
                tuple(names),
                max(min(count, MOST_TENSORS), len(names)),
            )
        elif event.where and event.code.startswith("GS2") and "what" not in data:
            before, _ = self._named.get(event.step, ((), 0))
            if len(before) < MOST_NAMES and event.where not in before:
                self._named[event.step] = (*before, event.where), len(before) + 1


def tensors_in(run: Run, meta: Mapping[str, Any]) -> int:
    """Return the number of gradient tensors of a run; 0 if unknown."""
    names = meta.get("parameters")
    return len(names) if isinstance(names, list) else len(run.tensors)


def _count(data: Mapping[str, Any], name: str) -> int | None:
    """Return a count of an event; None if it has none."""
    value = data.get(name)
    return value if isinstance(value, int) else None
