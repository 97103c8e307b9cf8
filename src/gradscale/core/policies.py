"""The policies: settings and rule in one frozen value."""

import inspect
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, runtime_checkable

from gradscale.core.state import FixedState, Observed, ScaleState, Where, f32
from gradscale.errors import ConfigError

# The smallest normal f32: a device that flushes subnormals reads smaller ones as 0.
LOWEST_SCALE = 2.0**-126
# The largest f32; its inverse is subnormal and still not zero.
HIGHEST_SCALE = 2.0**128 - 2.0**104


@runtime_checkable
class Policy(Protocol):
    """Settings plus rule. Pure: the state is an argument and the result."""

    @property
    def min_scale(self) -> float: ...

    @property
    def max_scale(self) -> float: ...

    def init_state(self) -> FixedState | ScaleState: ...

    # Any: a tuple of the policy's own type, over the values of any framework.
    def next_state(self, state: Any, seen: Observed, where: Where) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class NoScale:
    """Do not scale the loss; non-finite steps are still skipped.

    >>> NoScale().init_state()
    FixedState(scale=1.0)
    """

    @property
    def min_scale(self) -> float:
        return 1.0

    @property
    def max_scale(self) -> float:
        return 1.0

    def init_state(self) -> FixedState:
        """Return the state before the first step."""
        return FixedState(scale=1.0)

    def next_state(self, state: FixedState, seen: Observed, where: Where) -> FixedState:
        """Return the state after one step: the same."""
        return state


@dataclass(frozen=True, kw_only=True)
class StaticScale:
    """Keep one scale for the whole run; non-finite steps are skipped.

    >>> StaticScale(scale=1024.0).init_state()
    FixedState(scale=1024.0)
    """

    scale: float

    def __post_init__(self) -> None:
        _keep_scale(self, "scale", LOWEST_SCALE, HIGHEST_SCALE)

    @property
    def min_scale(self) -> float:
        return self.scale

    @property
    def max_scale(self) -> float:
        return self.scale

    def init_state(self) -> FixedState:
        """Return the state before the first step."""
        return FixedState(scale=self.scale)

    def next_state(self, state: FixedState, seen: Observed, where: Where) -> FixedState:
        """Return the state after one step: the same."""
        return state


@dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """Grow after a quiet interval, back off when a gradient is not finite.

    Finite: on every growth_interval-th such step in a row, scale *= growth_factor.
    Not finite: scale *= backoff_factor, and the count restarts.
    Either way the scale is then clipped to [min_scale, max_scale]; growth that is
    infinite in f32 leaves it as it is, as in torch.

    `gradscale.torch.device_state.update_kernel` restates this rule in one kernel; tests
    compare the two.

    With a tolerance, one overflow in every 1 / tolerance steps is forgiven: the step
    is skipped, the count restarts, the scale stays. Every further one backs off.

    >>> from gradscale.core.state import PYTHON
    >>> policy = DynamicScale(init_scale=8.0, growth_interval=2)
    >>> state = policy.init_state()
    >>> for finite in (True, True, False):
    ...     state = policy.next_state(state, Observed(finite, 1.0, True), PYTHON.where)
    ...     print(state.scale)
    8.0
    16.0
    8.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**126
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        _keep_scale(self, "min_scale", LOWEST_SCALE, HIGHEST_SCALE)
        _keep_scale(self, "max_scale", LOWEST_SCALE, HIGHEST_SCALE)
        if self.min_scale > self.max_scale:
            raise ConfigError(
                f"min_scale={self.min_scale:g} is above max_scale={self.max_scale:g}. "
                "No scale can satisfy both. Swap them, or omit one.",
                code="GS101",
            )
        _keep_scale(self, "init_scale", self.min_scale, self.max_scale)
        _check_factors(self)
        _check_interval(self)
        _check_tolerance(self)

    @classmethod
    def unchecked(cls, **settings: Any) -> "DynamicScale":
        """Return a policy whose settings are not validated.

        For drop-ins that accept the same settings as the scaler they replace: a
        min_scale of 0, a growth_factor of 1, values that are traced or on a device.
        Omitted settings have their defaults. The tolerance must be a Python number.

        >>> DynamicScale.unchecked(growth_factor=1, min_scale=0.0).min_scale
        0.0
        """
        given = inspect.signature(cls).bind(**settings)
        given.apply_defaults()
        policy = cls.__new__(cls)
        vars(policy).update(given.arguments)
        return policy

    @property
    def period(self) -> int:
        """Steps in which one overflow is forgiven; 0 if none is."""
        return math.ceil(1.0 / self.tolerance) if self.tolerance > 0.0 else 0

    def init_state(self) -> ScaleState:
        """Return the state before the first step."""
        return ScaleState(scale=self.init_scale, finite_steps=0, debt=0)

    def next_state(self, state: ScaleState, seen: Observed, where: Where) -> ScaleState:
        """Return the state after one step. Pure."""
        # Values may be traced or on a device: no if, and, or, not below.
        period = self.period
        steps = state.finite_steps + 1
        due = steps >= self.growth_interval
        grown = state.scale * self.growth_factor
        grown = where(due & (grown <= HIGHEST_SCALE), grown, state.scale)
        # A leaky bucket: it loses one unit a step, and a forgiven overflow fills it.
        debt = where(state.debt > 0, state.debt - 1, 0)
        forgiven = debt < min(period, 1)
        shrunk = where(forgiven, state.scale, state.scale * self.backoff_factor)
        moved = where(seen.finite, grown, shrunk)
        low, high = self.min_scale, self.max_scale
        return ScaleState(
            scale=where(moved < low, low, where(moved > high, high, moved)),
            finite_steps=where(seen.finite, where(due, 0, steps), 0),
            debt=where(seen.finite, debt, where(forgiven, period, debt)),
        )


def _keep_scale(policy: object, name: str, low: float, high: float) -> None:
    """Validate one scale and store it rounded to f32."""
    value = f32(_number(name, getattr(policy, name)))
    if not low <= value <= high:
        raise ConfigError(
            f"{name}={getattr(policy, name)} is outside [{low:g}, {high:g}]. "
            "Such a scale, or its inverse, is not a usable f32 or violates the bounds "
            "of the policy. Pass a value inside, or change min_scale and max_scale.",
            code="GS101",
        )
    object.__setattr__(policy, name, value)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(
            f"{name}={value!r} is a {type(value).__name__}. The rule computes with it, "
            "so it must be a number. Pass a float.",
            code="GS101",
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _check_factors(policy: "DynamicScale") -> None:
    growth = _number("growth_factor", policy.growth_factor)
    backoff = _number("backoff_factor", policy.backoff_factor)
    # Compared as f32: 1 + 1e-9 would never raise the scale.
    if not 1.0 < f32(growth) < math.inf:
        raise ConfigError(
            f"growth_factor={policy.growth_factor} can never raise the scale. "
            "The scale is multiplied by it after growth_interval finite steps, so it "
            "must exceed 1 and be finite in f32. Pass 2.0, or use StaticScale to keep "
            "the scale fixed.",
            code="GS101",
            replaces="The growth factor must be > 1.0." if growth <= 1.0 else None,
        )
    # Above the largest f32 below 1, rounding can give back the same scale.
    if not (f32(backoff) > 0.0 and backoff <= 1.0 - 2.0**-24):
        raise ConfigError(
            f"backoff_factor={policy.backoff_factor} can never lower the scale to a "
            "usable value. The scale is multiplied by it when a gradient is not "
            "finite, so it must be between 0 and 1. Pass 0.5, or use StaticScale to "
            "keep the scale fixed.",
            code="GS101",
            replaces="The backoff factor must be < 1.0." if backoff >= 1.0 else None,
        )
    object.__setattr__(policy, "growth_factor", growth)
    object.__setattr__(policy, "backoff_factor", backoff)


def _check_interval(policy: "DynamicScale") -> None:
    interval: object = policy.growth_interval
    if isinstance(interval, bool) or not isinstance(interval, Integral):
        raise ConfigError(
            f"growth_interval={interval!r} is a {type(interval).__name__}. It counts "
            "steps, so it must be a whole number. Pass an int.",
            code="GS101",
        )
    # The count is an i32 on the device.
    if not 1 <= int(interval) < 2**31:
        raise ConfigError(
            f"growth_interval={interval} is not a number of steps from 1 to 2^31 - 1. "
            "The scale grows on every growth_interval-th finite step in a row. "
            "Pass 2000, or use StaticScale to keep the scale fixed.",
            code="GS101",
        )
    object.__setattr__(policy, "growth_interval", int(interval))


def _check_tolerance(policy: "DynamicScale") -> None:
    tolerance = _number("tolerance", policy.tolerance)
    # From 0.5 on, an overflow on every second step would always be forgiven.
    if tolerance != 0.0 and not 2.0**-30 <= tolerance < 0.5:
        raise ConfigError(
            f"tolerance={policy.tolerance} is not a share of steps in [0, 0.5). It is "
            "the share of recent steps that may overflow before the scale backs off; "
            "at one half or more, a run could lose every second step and never "
            "recover. Pass 0.0 for the classic rule, or a small share such as 0.05.",
            code="GS101",
        )
    object.__setattr__(policy, "tolerance", tolerance)
