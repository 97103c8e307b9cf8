"""The primitives a rule may use, and their definition on Python floats."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Where = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class RuleOps:
    """What a framework supplies so that the rules run on its values.

    Attributes:
        where: `where(cond, a, b)`, elementwise choice without a branch.
    """

    where: Where


def f32(value: float) -> float:
    """Round to the nearest f32; too large becomes inf, as it does on a device.

    >>> f32(0.1)
    0.10000000149011612
    """
    return ctypes.c_float(value).value


def _where(cond: Any, a: Any, b: Any) -> Any:
    chosen = a if cond else b
    return f32(chosen) if isinstance(chosen, float) else chosen


# The living definition: every framework is tested against it.
PYTHON = RuleOps(where=_where)
