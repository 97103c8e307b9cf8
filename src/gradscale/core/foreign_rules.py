"""How each of the replaced scalers goes on from its saved state, said by a policy."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradscale.core.incumbent_fields import Fields
from gradscale.core.incumbents import SOURCES
from gradscale.core.policies import LOWEST_SCALE, DynamicScale
from gradscale.errors import StateError

Given = Mapping[str, Any]


class Found(NamedTuple):
    """What a saved state tells.

    Attributes:
        scale: The scale for the next loss.
        settings: Those of `DynamicScale`; None if the scale never moves.
        finite_steps, debt: The rest of the state.
    """

    scale: float
    settings: dict[str, Any] | None
    finite_steps: int = 0
    debt: int = 0


def _of_apex(fields: Fields, given: Given) -> Found:
    if "loss_scaler0" in fields:
        fields = Fields(fields.source, _only_loss(fields.values))
    if "cur_scale" in fields:
        if not _is_dynamic(fields):
            return Found(fields.number("cur_scale"), None)
        # apex.fp16_utils and apex.contrib: a floor of 1 in the code, no ceiling.
        window = fields.whole("scale_window", 1)
        settings = {**_moves(fields, window), "min_scale": 1.0}
        steps = _steps_since_overflow(fields) % window
        return Found(fields.number("cur_scale"), settings, steps)
    if "_loss_scale" in fields:
        return _of_apex_scaler(fields)
    scale, steps = fields.number("loss_scale"), fields.whole("unskipped")
    # amp.initialize() has no argument for the interval: it is always 2000.
    if steps >= 2000 and "growth_interval" not in given:
        raise StateError(
            f"The state saved by {fields.source} has unskipped={steps}. A dynamic "
            "scale restarts the count at 2000, so this one was fixed, and a fixed "
            "scale has no state to go on with. Use "
            f"GradScaler(policy=StaticScale(scale={scale})) and load nothing; or pass "
            "growth_interval= if it was another.",
            code="GS302",
        )
    moves = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    return Found(scale, {**moves, "max_scale": max(2.0**24, scale)}, steps)


def _of_apex_scaler(fields: Fields) -> Found:
    """Read an `apex.amp.scaler.LossScaler`, which FP16_Optimizer saves whole."""
    scale = fields.number("_loss_scale")
    if not fields.flag("dynamic"):
        return Found(scale, None)
    settings = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": fields.whole("_scale_seq_len", 1),
        "max_scale": fields.number("_max_loss_scale"),
    }
    if "_min_loss_scale" in fields:
        settings["min_scale"] = fields.number("_min_loss_scale")
    return Found(scale, settings, fields.whole("_unskipped"))


def _only_loss(values: Mapping[str, Any]) -> Mapping[str, Any]:
    names = [name for name in values if re.fullmatch(r"loss_scaler\d+", name)]
    if len(names) > 1:
        raise StateError(
            f"The state saved by {SOURCES['apex']} has {len(names)} scalers, one for "
            "each loss. A scaler here has one scale. Make one for each loss, and "
            f"import saved[{names[0]!r}], saved[{names[1]!r}] and so on into them.",
            code="GS304",
        )
    only: Mapping[str, Any] = values["loss_scaler0"]
    if not isinstance(only, Mapping):
        raise Fields(SOURCES["apex"], values).bad("loss_scaler0", "a dict")
    return only


def _of_deepspeed(fields: Fields, given: Given) -> Found:
    scale = fields.number("cur_scale")
    if not _is_dynamic(fields):
        return Found(scale, None)
    window = fields.whole("scale_window", 1)
    steps = _steps_since_overflow(fields)
    # After an overflow the scale grows on the finite step with number window + 1, and
    # then on every window-th one. The former is kept: growth is what overflows.
    settings = _moves(fields, window + 1)
    finite_steps = 1 + (steps - 1) % window if steps else 0
    if "min_scale" in fields:
        settings["min_scale"] = fields.number("min_scale")
    else:
        settings["min_scale"] = _assumed_floor(1.0, scale)
    if "delayed_shift" not in fields or fields.whole("delayed_shift") <= 1:
        return Found(scale, settings, finite_steps)
    left = int(fields.number("cur_hysteresis"))
    tolerance, debt = _forgiving(settings["growth_interval"], finite_steps, left)
    return Found(scale, {**settings, "tolerance": tolerance}, finite_steps, debt)


def _of_megatron(fields: Fields, given: Given) -> Found:
    scale, steps = fields.number("scale"), fields.whole("growth_tracker")
    interval = int(given.get("growth_interval", 1000))
    left = int(fields.number("hysteresis_tracker"))
    tolerance, debt = _forgiving(interval, steps, left)
    settings = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": interval,
        "min_scale": _assumed_floor(1.0, scale),
        "tolerance": tolerance,
    }
    return Found(scale, settings, steps, debt)


def _of_fairseq(fields: Fields, given: Given) -> Found:
    scale = fields.number("loss_scale")
    if "_iter" not in fields:
        # A checkpoint has the scale alone, and fairseq counts from 0 when it resumes.
        # Its interval is 2^14, divided by workers and accumulated batches.
        settings = {
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2**14,
            "min_scale": _assumed_floor(1e-4, scale),
        }
        return Found(scale, settings)
    window = fields.whole("scale_window", 1)
    settings = _moves(fields, window)
    settings["min_scale"] = fields.number("min_loss_scale")
    if "threshold" in fields:
        floors = settings["min_scale"], fields.number("threshold")
        settings["min_scale"] = max(floors)
    passed = _steps_since_overflow(fields, "_iter", "_last_overflow_iter")
    tolerance = settings["tolerance"] = fields.number("tolerance")
    debt = 0
    if tolerance > 0.0:
        # The share of overflows since the scale last moved, the next one included.
        overflows = fields.whole("_overflows_since_rescale") + 1
        since = fields.whole("_iter") - fields.whole("_last_rescale_iter", -1)
        debt = max(0, math.floor(overflows / tolerance) - since + 2)
    return Found(scale, settings, passed % window, debt)


def _of_flax(fields: Fields, given: Given) -> Found:
    interval = 2000
    if "growth_interval" in fields:
        interval = fields.whole("growth_interval", 1)
    settings: dict[str, Any] = {
        name: fields.number(name) if name in fields else default
        for name, default in (("growth_factor", 2.0), ("backoff_factor", 0.5))
    }
    # Flax grows one step after the interval is full; the drop-in for it need not.
    late = "flax_count" not in fields or fields.flag("flax_count")
    settings["growth_interval"] = interval + late
    settings["min_scale"] = LOWEST_SCALE
    if "minimum_scale" in fields:
        settings["min_scale"] = max(LOWEST_SCALE, fields.number("minimum_scale"))
    return Found(fields.number("scale"), settings, fields.whole("fin_steps"))


def _of_jmp(fields: Fields, given: Given) -> Found:
    scale = fields.number("loss_scale")
    if "counter" not in fields:
        return Found(scale, None)
    factor = fields.number("factor")
    if factor <= 1.0:
        raise fields.bad("factor", "above 1")
    settings = {
        "growth_factor": factor,
        "backoff_factor": 1.0 / factor,
        "growth_interval": fields.whole("period", 1),
        "min_scale": max(LOWEST_SCALE, fields.number("min_loss_scale")),
    }
    return Found(scale, settings, fields.whole("counter"))


def _is_dynamic(fields: Fields) -> bool:
    for name in ("dynamic", "dynamic_loss_scale"):
        if name in fields:
            return fields.flag(name)
    # The older static class has nothing but its scale.
    return len(fields.values) > 1


def _moves(fields: Fields, interval: int) -> dict[str, Any]:
    factor = fields.number("scale_factor")
    if factor <= 1.0:
        raise fields.bad("scale_factor", "above 1")
    return {
        "growth_factor": factor,
        "backoff_factor": 1.0 / factor,
        "growth_interval": interval,
    }


def _steps_since_overflow(
    fields: Fields, now: str = "cur_iter", last: str = "last_overflow_iter"
) -> int:
    steps = fields.whole(now) - fields.whole(last, -1) - 1
    if steps < 0:
        raise fields.bad(last, f"before {now}={fields.values[now]!r}")
    return steps


def _assumed_floor(default: float, scale: float) -> float:
    """Return a floor that the state does not tell and that the scale may be below."""
    return min(default, max(scale, DynamicScale.min_scale))


def _forgiving(interval: int, finite_steps: int, left: int) -> tuple[float, int]:
    """Return the tolerance and the debt that come closest to a hysteresis.

    A growth refills the hysteresis: with none left, the next overflow is forgiven
    after it. The tolerance forgives one overflow in as many steps as that takes.

    Args:
        interval: The growth interval.
        finite_steps: How much of it has passed.
        left: The overflow with this number backs off.
    """
    # From 3 on: a tolerance has to be below one half.
    period = max(interval + 1, 3)
    tolerance = 1.0 / period
    # The inverse of the inverse may be a little more than the period.
    while math.ceil(1.0 / tolerance) > period:
        tolerance = math.nextafter(tolerance, 1.0)
    return tolerance, 0 if left > 1 else max(0, interval - finite_steps + 1)


READERS: dict[str, Callable[[Fields, Given], Found]] = {
    "apex": _of_apex,
    "deepspeed": _of_deepspeed,
    "megatron": _of_megatron,
    "fairseq": _of_fairseq,
    "flax": _of_flax,
    "jmp": _of_jmp,
}
