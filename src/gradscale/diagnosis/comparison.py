"""Compares two runs: settings that differ, and the step at which they diverge."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from gradscale.diagnosis.diagnosis import Diagnosis, diagnose_run
from gradscale.runfile import Run, StepRow

# Metadata that differs between runs with equal settings.
_OCCASION = {"start", "end", "pid", "resumed", "dropped", "details_dropped"}
_OCCASION |= {"events_dropped", "parameters", "path", "process_start"}
# In this order: causes before their consequences.
COLUMNS = ("scale", "applied", "verdict", "loss", "norm", "amax")
ABSENT = "–"
_columns_of = attrgetter(*COLUMNS)


class Setting(NamedTuple):
    """One setting that differs; a value of `ABSENT` means that a run lacks it."""

    name: str
    a: Any
    b: Any


class Parting(NamedTuple):
    """The first step at which a column of two runs differs."""

    step: int
    column: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        a: The first run.
        b: The second run.
        settings: Those that differ.
        shared: Steps that both have.
        partings: Where each column diverges, the earliest first; empty if none does.
    """

    a: Diagnosis
    b: Diagnosis
    settings: tuple[Setting, ...]
    shared: int
    partings: tuple[Parting, ...]

    @property
    def same(self) -> bool:
        """True if both runs have the same steps and those do not differ."""
        return not self.partings and self.shared == self.a.steps == self.b.steps

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        return {
            "same": self.same,
            "shared_steps": self.shared,
            "parts_at": self.partings[0]._asdict() if self.partings else None,
            "partings": [parting._asdict() for parting in self.partings],
            "settings": [setting._asdict() for setting in self.settings],
            "a": self.a.as_dict(),
            "b": self.b.as_dict(),
        }


def compare_runs(
    a: Run, b: Run, *, on_steps: Callable[[int], None] | None = None
) -> Comparison:
    """Read two runs and return their differences.

    Args:
        a: Open for reading.
        b: Open for reading.
        on_steps: Called periodically with the number of steps read since the last
            call.
    """
    shared, partings = _part(a, b)
    first, second = (
        diagnose_run(a, on_steps=on_steps),
        diagnose_run(b, on_steps=on_steps),
    )
    return Comparison(
        a=first,
        b=second,
        settings=tuple(_settings(first.meta, second.meta)),
        shared=shared,
        partings=tuple(partings),
    )


def _part(a: Run, b: Run) -> tuple[int, list[Parting]]:
    found: dict[str, Parting] = {}
    shared = 0
    for one, two in _together(a.steps(), b.steps()):
        shared += 1
        # Nearly always all columns are equal.
        if _columns_of(one) == _columns_of(two) or len(found) == len(COLUMNS):
            continue
        for column in COLUMNS:
            left, right = getattr(one, column), getattr(two, column)
            if column not in found and not _equal(left, right):
                found[column] = Parting(one.step, column, left, right)
    ranked = sorted(found.values(), key=lambda p: (p.step, COLUMNS.index(p.column)))
    return shared, ranked


def _together(
    a: Iterator[StepRow], b: Iterator[StepRow]
) -> Iterator[tuple[StepRow, StepRow]]:
    """Yield the rows of both runs for each step that both have."""
    one, two = next(a, None), next(b, None)
    while one is not None and two is not None:
        if one.step == two.step:
            yield one, two
            one, two = next(a, None), next(b, None)
        elif one.step < two.step:
            one = next(a, None)
        else:
            two = next(b, None)


def _equal(left: Any, right: Any) -> bool:
    both = isinstance(left, float) and isinstance(right, float)
    return left == right or (both and math.isnan(left) and math.isnan(right))


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Setting]:
    one, two = dict(_flat(a)), dict(_flat(b))
    for name in {**one, **two}:
        left, right = one.get(name, ABSENT), two.get(name, ABSENT)
        if not _equal(left, right):
            yield Setting(name, left, right)


def _flat(meta: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in meta.items():
        if not prefix and name in _OCCASION:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
