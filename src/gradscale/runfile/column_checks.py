"""Converts the values of a run file to rows. A file may come from any program.

SQLite enforces no types, and a damaged file can hold anything. Every check returns the
value in the type that the rest of the package relies on, and raises ValueError for a
value that no writer produces.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gradscale.runfile.rows import LONGEST_NAME, NAN, unpacked

# Exact as a float, which is what figures and JSON readers use.
LAST_STEP = 2**53
# Seconds since 1970; the year 5138.
LAST_TIME = 1e11
# Names of 100,000 parameters; parsed, a text takes up to 25 times its length.
LONGEST_META = 8 << 20
LONGEST_EVENT = 1 << 20
# Digits of an integer in JSON; a float holds 308.
LONGEST_INTEGER = 300
# Levels of JSON: functions that walk it recurse.
DEEPEST = 64

_CODE = re.compile(r"GS\d{3}")
# The entries of `meta` that reports use, by type; others may be anything.
_META = {
    "dropped": int,
    "end": dict,
    "framework": str,
    "frameworks": dict,
    "parameters": list,
    "rank": int,
    "world_size": int,
}

Check = Callable[[Any], Any]


class Table(NamedTuple):
    """The columns of a query, with the check of each.

    Attributes:
        name: Of the table, for messages.
        checks: By column. The first column is the key: it ascends.
    """

    name: str
    checks: Mapping[str, Check]

    def rows(
        self, found: Iterable[Sequence[Any]], after: int | str | None = None
    ) -> Iterator[list[Any]]:
        """Yield the checked values of each row; the first key is above `after`.

        In a damaged file a query may return rows out of order, and endlessly many.
        """
        checks = tuple(self.checks.values())
        for values in found:
            try:
                row = [
                    check(value) for check, value in zip(checks, values, strict=True)
                ]
            except ValueError:
                raise self._wrong(values) from None
            if after is not None and row[0] <= after:
                key = next(iter(self.checks))
                raise ValueError(
                    f"the table {self.name} has {key} {_shown(row[0])} after "
                    f"{_shown(after)}"
                )
            after = row[0]
            yield row

    def _wrong(self, values: Sequence[Any]) -> ValueError:
        """Return the error for a row, which names the first wrong column."""
        key = next(iter(self.checks))
        for (column, check), value in zip(self.checks.items(), values, strict=True):
            try:
                check(value)
            except ValueError as error:
                return ValueError(
                    f"{self.name}.{column} in the row of {key} {_shown(values[0])}: "
                    f"{error}"
                )
        raise AssertionError("a row that was refused has no wrong column")


def step_number(value: Any) -> int:
    """Return the number of a step."""
    if type(value) is int and 0 < value <= LAST_STEP:
        return value
    raise ValueError(f"{_shown(value)} is no step")


def count(value: Any) -> int:
    """Return a count."""
    if type(value) is int and value >= 0:
        return value
    raise ValueError(f"{_shown(value)} is no count")


def flag(value: Any) -> bool:
    """Return a bool, stored as 0 or 1."""
    if type(value) is int and 0 <= value <= 1:
        return value == 1
    raise ValueError(f"{_shown(value)} is neither 0 nor 1")


def time(value: Any) -> float:
    """Return seconds since 1970."""
    if type(value) is float and 0.0 <= value < LAST_TIME:
        return value
    raise ValueError(f"{_shown(value)} is no time")


def number(value: Any) -> float:
    """Return a float; a NaN is stored as text."""
    if type(value) is float:
        return value
    if value == NAN:
        return math.nan
    raise ValueError(f"{_shown(value)} is no number")


def code(value: Any) -> str:
    """Return a code of the catalogue, of this or a newer version."""
    if type(value) is str and _CODE.fullmatch(value):
        return value
    raise ValueError(f"{_shown(value)} is no code")


def name(value: Any) -> str:
    """Return a name."""
    if type(value) is str and len(value) <= LONGEST_NAME:
        return value
    raise ValueError(f"{_shown(value)} is no name")


def histogram(value: Any) -> tuple[int, ...]:
    """Return the counts of a packed histogram."""
    if type(value) is bytes:
        return unpacked(value)
    raise ValueError(f"{_shown(value)} is no histogram")


def optional(check: Check) -> Check:
    """Return the same check, where a value may be missing."""
    return lambda value: None if value is None else check(value)


def json_value(text: Any, longest: int) -> Any:
    """Return the value of a JSON text.

    >>> json_value('{"lr": 0.1}', 100)
    {'lr': 0.1}
    >>> json_value("[" * 1000 + "]" * 1000, 10_000)
    Traceback (most recent call last):
        ...
    ValueError: JSON with more than 64 levels
    """
    if type(text) is not str:
        raise ValueError(f"{_shown(text)} is no text")
    if len(text) > longest:
        raise ValueError(f"a text of {len(text):,} characters")
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise _too_deep() from None
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [item for each in level for item in _items(each)]
        if not level:
            return value
    raise _too_deep()


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


def _too_deep() -> ValueError:
    return ValueError(f"JSON with more than {DEEPEST} levels")


def _meta_value(text: Any) -> Any:
    return json_value(text, LONGEST_META)


def _event_data(text: Any) -> Any:
    return json_value(text, LONGEST_EVENT)


def meta_of(found: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Return `meta` from its rows. Entries that reports use have their type."""
    meta: dict[str, Any] = dict(META.rows(found))
    for key, kind in _META.items():
        if key in meta and type(meta[key]) is not kind:
            raise ValueError(f"the entry {key} of meta is {_shown(meta[key])}")
    # Every writer writes it; a file without it would be followed for ever.
    state = meta.get("end", {}).get("state")
    if type(state) is not str:
        raise ValueError(f"the entry end of meta has the state {_shown(state)}")
    return meta


def _shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    short = value[:40] if isinstance(value, (str, bytes)) else value
    text = repr(short)
    return f"{text[:60]}…" if len(text) > 60 or short != value else text


META = Table("meta", {"key": name, "value": _meta_value})
STEPS = Table(
    "steps",
    {
        "step": step_number,
        "time": time,
        "scale": number,
        "applied": flag,
        "verdict": code,
        "norm": optional(number),
        "amax": optional(number),
        "loss": optional(number),
    },
)
NEWEST = Table("steps", {"step": optional(step_number)})
TENSORS = Table("tensors", {"id": count, "name": name})
PEAKS = Table("peaks", {"tensor": count, "name": name, "peak": number})
SAMPLES = Table(
    "samples",
    {
        "tensor": count,
        "name": name,
        "total": count,
        "zeros": count,
        "subnormals": count,
        "histogram": histogram,
        "below": count,
        "above": count,
        "nonfinite": count,
    },
)
EVENTS = Table(
    "events",
    {
        "id": count,
        "step": optional(count),
        "time": time,
        "code": code,
        "where": optional(name),
        "data": _event_data,
    },
)
