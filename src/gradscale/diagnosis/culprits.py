"""Who was not finite, as the events and the peaks of a run have it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from gradscale.runfile import EventRow, Run


class Place(NamedTuple):
    """Where a value was lost, as an instrument saw it in a training run.

    Attributes:
        step: The step it was seen in.
        module: The dotted name of the module, as `named_modules()` has it.
        direction: "forward" or "backward".
        operation: The operation, if it is known.
        said: All of it in one line.
        instead: The safe form of a known unsafe pattern; empty if it is none.
        at: Operation and module in words.
        tensor: What was not finite, such as "output"; empty if it is not known.
        kind: "nan" or "inf"; empty if it is not known.
        loss_finite: Whether the loss of that step was; None if it is not known.
    """

    step: int
    module: str
    direction: str
    operation: str
    said: str
    instead: str
    at: str = ""
    tensor: str = ""
    kind: str = ""
    loss_finite: bool | None = None


@dataclass(kw_only=True)
class Culprit:
    """One tensor that was not finite, over a whole run.

    Attributes:
        name: The dotted name of the parameter.
        steps: In how many steps it was not finite.
        first_in: In how many of them it was the first.
        nan: In how many of them it was NaN, as far as peaks were kept.
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
        """Return the culprit as JSON has it."""
        return asdict(self)


class Who(NamedTuple):
    """The tensors that were not finite in one step.

    Attributes:
        names: In the order in which they were recorded.
        nan: Those that were NaN, as far as peaks were kept.
        number: How many there were; long lists are cut short.
    """

    names: tuple[str, ...]
    nan: frozenset[str]
    number: int

    @property
    def counted(self) -> tuple[str, ...]:
        """The names, and an empty one for each that was cut off."""
        return self.names + ("",) * (self.number - len(self.names))


NOBODY = Who((), frozenset(), 0)


class Culprits:
    """Answers for each step who was not finite, and counts the answers.

    Args:
        run: Its peaks are read when they are asked for.
        events: All events of the run.
    """

    def __init__(self, run: Run, events: Iterable[EventRow]) -> None:
        self._run = run
        self._peaks = set(run.peak_steps())
        self._named: dict[int, tuple[tuple[str, ...], int]] = {}
        self._blamed: tuple[tuple[str, ...], int] = ((), 0)
        self.places: list[Place] = []
        self._counts: dict[str, Culprit] = {}
        for event in events:
            self._take(event)

    def at(self, step: int, *, weights: bool = False) -> Who:
        """Return who was not finite in a step that was skipped, and count it.

        Steps come in order. Where no event names the tensors, they are those of the
        step before: the same ones are not named twice.

        Args:
            step: Its number.
            weights: It is weights that were not finite. The peaks, of gradients, then
                tell nothing that matters.
        """
        if step in self._named:
            self._blamed = self._named[step]
        named, count = self._blamed
        peaks = self._run.peaks(step) if step in self._peaks else {}
        bad = tuple(name for name, peak in peaks.items() if not math.isfinite(peak))
        nan = frozenset(name for name in bad if math.isnan(peaks[name]))
        if bad and not (weights and named):
            # Events list tensors in the order of backward, peaks have all of them.
            first = tuple(name for name in named if name in bad)
            named = first + tuple(name for name in bad if name not in first)
            count = len(named)
        names = named
        if not names:
            return NOBODY
        for place, name in enumerate(names):
            culprit = self._counts.setdefault(name, Culprit(name=name, first=step))
            culprit.steps += 1
            culprit.first_in += place == 0
            culprit.nan += name in nan
            culprit.last = step
        return Who(names, nan, count)

    def top(self) -> tuple[Culprit, ...]:
        """Return all culprits, the most frequent first."""
        ranked = sorted(
            self._counts.values(),
            key=lambda each: (-each.first_in, -each.steps, each.first, each.name),
        )
        return tuple(ranked)

    def place(self, since: int, loss_finite: bool | None = None) -> Place | None:
        """Return the first place that an instrument named from a step on.

        Args:
            since: The step.
            loss_finite: Only places under a loss that was finite, or that was not; a
                place that does not say is either.
        """
        fitting = (
            (loss_finite, None) if loss_finite is not None else (True, False, None)
        )
        return next(
            (
                place
                for place in self.places
                if place.step >= since and place.loss_finite in fitting
            ),
            None,
        )

    def _take(self, event: EventRow) -> None:
        if event.step is None:
            return
        data = event.data if isinstance(event.data, Mapping) else {}
        place = _place(event.step, data)
        if place is not None:
            self.places.append(place)
            return
        names = data.get("culprits")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            count = data.get("count", len(names))
            self._named[event.step] = tuple(names), max(int(count), len(names))
        elif event.where and event.code.startswith("GS2") and "what" not in data:
            before, _ = self._named.get(event.step, ((), 0))
            if event.where not in before:
                self._named[event.step] = (*before, event.where), len(before) + 1


def tensors_in(run: Run, meta: Mapping[str, Any]) -> int:
    """Return how many gradient tensors a run has, 0 if that is not known."""
    names = meta.get("parameters")
    return len(names) if isinstance(names, list) else len(run.tensors)


def _place(step: int, data: Mapping[str, Any]) -> Place | None:
    if not (data.get("found") is True and data.get("direction")):
        return None
    module, pattern = data.get("module"), data.get("pattern")
    named = module or ("the model itself" if module == "" else "no module")
    kind = f" ({data['module_class']})" if data.get("module_class") else ""
    direction, operation = str(data["direction"]), str(data.get("operation") or "")
    parts = [f"{direction} of {named}{kind}", operation, str(data.get("tensor") or "")]
    said = ", ".join(part for part in parts if part)
    if data.get("count"):
        bad = "NaN" if data.get("kind") == "nan" else data.get("kind") or "not finite"
        said += f": {data['count']:,} of {data.get('elements', 0):,} {bad}"
    instead = pattern.get("instead", "") if isinstance(pattern, Mapping) else ""
    inside = f"module {module}" if module else "the model" if module == "" else ""
    at = " in ".join(part for part in (operation, inside) if part)
    loss_finite = data.get("loss_finite")
    return Place(
        step=step,
        module=str(module or ""),
        direction=direction,
        operation=operation,
        said=said,
        instead=str(instead),
        at=at or "what is outside of any module",
        tensor=str(data.get("tensor") or ""),
        kind=str(data.get("kind") or ""),
        loss_finite=loss_finite if isinstance(loss_finite, bool) else None,
    )
