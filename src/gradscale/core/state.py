"""The inputs and states of scaling rules, and the primitives they may use."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Where = Callable[[Any, Any, Any], Any]


class Observed(NamedTuple):
    """The result of one read of the gradients.

    Attributes:
        finite: bool[], every gradient element on every rank is finite.
        amax: f32[], the largest magnitude among the scaled gradients.
        loss_finite: bool[], the loss was finite before it was scaled.
    """

    finite: Any
    amax: Any
    loss_finite: Any


class FixedState(NamedTuple):
    """The state of a policy whose scale never moves.

    Attributes:
        scale: f32[], factor on the loss.
    """

    scale: Any


class ScaleState(NamedTuple):
    """The state of `DynamicScale`.

    Attributes:
        scale: f32[], factor on the loss; in [min_scale, max_scale] at all times.
        finite_steps: i32[], finite steps in a row since the rule last acted.
        debt: i32[], finite steps still owed for the last forgiven overflow; 0 if none.
    """

    scale: Any
    finite_steps: Any
    debt: Any = 0


@dataclass(frozen=True)
class RuleOps:
    """The primitives a framework supplies so that the rules run on its values.

    Attributes:
        where: `where(cond, a, b)`, elementwise choice without a branch.
    """

    where: Where


def f32(value: float) -> float:
    """Round to the nearest f32; values out of range become inf, as on a device.

    >>> f32(0.1)
    0.10000000149011612
    """
    return ctypes.c_float(value).value


def _where(cond: Any, a: Any, b: Any) -> Any:
    chosen = a if cond else b
    return f32(chosen) if isinstance(chosen, float) else chosen


# The reference: every framework's result is tested against it.
PYTHON = RuleOps(where=_where)
