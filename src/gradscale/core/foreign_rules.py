"""Recognises the saved states of other scalers and translates them to policies."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

from gradscale.core.policies import LOWEST_SCALE, DynamicScale
from gradscale.errors import StateError

Given = Mapping[str, Any]
# The values of `source`, and the library each stands for.
SOURCES = {
    "torch": "torch.amp.GradScaler",
    "apex": "NVIDIA apex",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-Core",
    "fairseq": "fairseq",
    "flax": "flax",
    "jmp": "jmp",
}
# Libraries that write states with these keys; the first row that matches counts.
SIGNS: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (("megatron",), frozenset({"hysteresis_tracker"})),
    (("flax",), frozenset({"fin_steps"})),
    (("torch",), frozenset({"scale", "growth_interval"})),
    (("jmp",), frozenset({"loss_scale", "counter"})),
    (("apex",), frozenset({"loss_scaler0"})),
    (("apex",), frozenset({"loss_scale", "unskipped"})),
    (("apex",), frozenset({"_loss_scale", "_unskipped"})),
    (("fairseq",), frozenset({"loss_scale", "param_groups"})),
    (("fairseq",), frozenset({"loss_scale", "_last_overflow_iter"})),
    (("deepspeed",), frozenset({"cur_scale", "fp32_groups_flat"})),
    (("deepspeed",), frozenset({"cur_scale", "dynamic"})),
    # DeepSpeed copied this optimizer from apex, key for key, and changed its rule.
    (("apex", "deepspeed"), frozenset({"cur_scale", "dynamic_loss_scale"})),
    (("apex",), frozenset({"cur_scale", "last_overflow_iter"})),
)
# Keys under which a larger checkpoint stores the state of the scaler.
HOLDERS = (
    "loss_scaler",
    "grad_scaler",
    "dynamic_scale",
    "last_optimizer_state",
    "optimizer_state_dict",
    "optimizer",
)


def recognise(saved: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the libraries that may have saved a value, and the scaler's fields.

    Args:
        saved: A dict, an object with attributes, or a larger checkpoint that contains
            one of them. The tuple is empty if no library matches.

    >>> recognise({"optimizer": {"grad_scaler": {"hysteresis_tracker": 2}}})
    (('megatron',), {'hysteresis_tracker': 2})
    """
    if isinstance(saved, Mapping):
        fields = dict(saved)
    else:
        fields = dict(getattr(saved, "__dict__", {}))
    for sources, signs in SIGNS:
        if signs <= fields.keys():
            return sources, fields
    for key in HOLDERS:
        if key in fields:
            sources, inner = recognise(fields[key])
            if sources:
                return sources, inner
    return (), fields


def foreign_state_error(saved: Any) -> StateError | None:
    """Return the error for a state of another library's scaler; None if it is ours."""
    sources, _ = recognise(saved)
    if not sources or sources == ("torch",):
        return None
    argument = "" if len(sources) == 1 else f", source={sources[0]!r}"
    return StateError(
        f"The checkpoint was saved by {library_names(sources)}. Its keys and its rule "
        "differ from those of this scaler, so it cannot be loaded directly. Call "
        f"scaler.load_state_dict(gradscale.import_state(saved{argument})), where saved "
        "is the value you passed.",
        code="GS304",
    )


def library_names(sources: tuple[str, ...]) -> str:
    """Return the names of libraries, joined by "or"."""
    return " or ".join(SOURCES[source] for source in sources)


@dataclass(frozen=True)
class Fields:
    """The fields of a saved state, read as numbers or refused.

    Attributes:
        source: The name of the library that saved it.
        values: Python numbers, or arrays and tensors of one element. Reading one that
            is on a device waits for it.
    """

    source: str
    values: Mapping[str, Any]

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def number(self, key: str) -> float:
        """Return a finite number."""
        value = self._plain(key)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise self.bad(key, "one number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.bad(key, "a finite number")
        return number

    def whole(self, key: str, least: int = 0) -> int:
        """Return a whole number that is not below `least`."""
        number = self.number(key)
        if not number.is_integer() or number < least:
            raise self.bad(key, f"a whole number, {least} or more")
        plain = self._plain(key)
        return int(plain) if isinstance(plain, Integral) else int(number)

    def flag(self, key: str) -> bool:
        """Return True or False."""
        value = self._plain(key)
        if not isinstance(value, bool):
            raise self.bad(key, "True or False")
        return value

    def bad(self, key: str, wanted: str) -> StateError:
        """Return the error for a value that cannot be used."""
        return StateError(
            f"The state saved by {self.source} has {key}={self.values[key]!r}, which "
            f"is not {wanted}. Resuming from it would corrupt the run. Nothing was "
            "imported; repair the value, or start without this state.",
            code="GS302",
        )

    def _plain(self, key: str) -> Any:
        if key not in self:
            raise StateError(
                f"The state saved by {self.source} lacks {key}. Without it, the run "
                "would resume from a different state than the saved one. Pass the "
                "complete state, as it was saved.",
                code="GS302",
            )
        value = self.values[key]
        if isinstance(value, Real) or not hasattr(value, "item"):
            return value
        try:
            return value.item()
        # Of several elements: a ValueError in NumPy and JAX, a RuntimeError in torch.
        except (TypeError, ValueError, RuntimeError) as error:
            raise self.bad(key, "one number") from error


class Translated(NamedTuple):
    """A saved state in the terms of `DynamicScale`.

    Attributes:
        scale: The scale for the next loss.
        settings: Arguments of `DynamicScale`; None if the scale is fixed.
        finite_steps, debt: The other fields of `ScaleState`.
    """

    scale: float
    settings: dict[str, Any] | None
    finite_steps: int = 0
    debt: int = 0


def _of_apex(fields: Fields, given: Given) -> Translated:
    if "loss_scaler0" in fields:
        fields = Fields(fields.source, _only_loss(fields))
    if "cur_scale" in fields:
        if not _is_dynamic(fields):
            return Translated(fields.number("cur_scale"), None)
        # apex.fp16_utils and apex.contrib: a floor of 1 in the code, no ceiling.
        window = fields.whole("scale_window", 1)
        settings = {**_moves(fields, window), "min_scale": 1.0}
        steps = _steps_since_overflow(fields) % window
        return Translated(fields.number("cur_scale"), settings, steps)
    if "_loss_scale" in fields:
        return _of_apex_scaler(fields)
    scale, steps = fields.number("loss_scale"), fields.whole("unskipped")
    # amp.initialize() has no argument for the interval: it is always 2000.
    if steps >= 2000 and "growth_interval" not in given:
        raise StateError(
            f"The state saved by {fields.source} has unskipped={steps}. A dynamic "
            "scale restarts the count at 2000, so this scale was fixed, and a fixed "
            "scale has no state to resume. Use "
            f"GradScaler(policy=StaticScale(scale={scale})) and load nothing; or pass "
            "growth_interval= if the interval was not 2000.",
            code="GS302",
        )
    moves = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    return Translated(scale, {**moves, "max_scale": max(2.0**24, scale)}, steps)


def _of_apex_scaler(fields: Fields) -> Translated:
    """Read an `apex.amp.scaler.LossScaler`, as FP16_Optimizer saves it."""
    scale = fields.number("_loss_scale")
    if not fields.flag("dynamic"):
        return Translated(scale, None)
    settings = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": fields.whole("_scale_seq_len", 1),
        "max_scale": fields.number("_max_loss_scale"),
    }
    if "_min_loss_scale" in fields:
        settings["min_scale"] = fields.number("_min_loss_scale")
    return Translated(scale, settings, fields.whole("_unskipped"))


def _only_loss(fields: Fields) -> Mapping[str, Any]:
    names = [name for name in fields.values if re.fullmatch(r"loss_scaler\d+", name)]
    if len(names) > 1:
        raise StateError(
            f"The state saved by {fields.source} has {len(names)} scalers, one for "
            "each loss. A gradscale scaler has one scale. Create one for each loss, "
            f"and import saved[{names[0]!r}], saved[{names[1]!r}] and so on into them.",
            code="GS304",
        )
    only: Mapping[str, Any] = fields.values["loss_scaler0"]
    if not isinstance(only, Mapping):
        raise fields.bad("loss_scaler0", "a dict")
    return only


def _of_deepspeed(fields: Fields, given: Given) -> Translated:
    scale = fields.number("cur_scale")
    if not _is_dynamic(fields):
        return Translated(scale, None)
    window = fields.whole("scale_window", 1)
    steps = _steps_since_overflow(fields)
    # After an overflow the scale grows on the finite step with number window + 1, and
    # then on every window-th one. The former is kept, because growth causes overflows.
    settings = _moves(fields, window + 1)
    finite_steps = 1 + (steps - 1) % window if steps else 0
    if "min_scale" in fields:
        settings["min_scale"] = fields.number("min_scale")
    else:
        settings["min_scale"] = _assumed_floor(1.0, scale)
    if "delayed_shift" not in fields or fields.whole("delayed_shift") <= 1:
        return Translated(scale, settings, finite_steps)
    left = int(fields.number("cur_hysteresis"))
    tolerance, debt = _forgiving(settings["growth_interval"], finite_steps, left)
    return Translated(scale, {**settings, "tolerance": tolerance}, finite_steps, debt)


def _of_megatron(fields: Fields, given: Given) -> Translated:
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
    return Translated(scale, settings, steps, debt)


def _of_fairseq(fields: Fields, given: Given) -> Translated:
    scale = fields.number("loss_scale")
    if "_iter" not in fields:
        # A checkpoint has only the scale, and fairseq counts from 0 when it resumes.
        # Its interval is 2^14, divided by workers and accumulated batches.
        settings = {
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2**14,
            "min_scale": _assumed_floor(1e-4, scale),
        }
        return Translated(scale, settings)
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
    return Translated(scale, settings, passed % window, debt)


def _of_flax(fields: Fields, given: Given) -> Translated:
    interval = 2000
    if "growth_interval" in fields:
        interval = fields.whole("growth_interval", 1)
    settings: dict[str, Any] = {
        name: fields.number(name) if name in fields else default
        for name, default in (("growth_factor", 2.0), ("backoff_factor", 0.5))
    }
    # Flax grows one step after the interval is full; its drop-in may not.
    late = "flax_count" not in fields or fields.flag("flax_count")
    settings["growth_interval"] = interval + late
    settings["min_scale"] = LOWEST_SCALE
    if "minimum_scale" in fields:
        settings["min_scale"] = max(LOWEST_SCALE, fields.number("minimum_scale"))
    return Translated(fields.number("scale"), settings, fields.whole("fin_steps"))


def _of_jmp(fields: Fields, given: Given) -> Translated:
    scale = fields.number("loss_scale")
    if "counter" not in fields:
        return Translated(scale, None)
    factor = fields.number("factor")
    if factor <= 1.0:
        raise fields.bad("factor", "above 1")
    settings = {
        "growth_factor": factor,
        "backoff_factor": 1.0 / factor,
        "growth_interval": fields.whole("period", 1),
        "min_scale": max(LOWEST_SCALE, fields.number("min_loss_scale")),
    }
    return Translated(scale, settings, fields.whole("counter"))


def _is_dynamic(fields: Fields) -> bool:
    for name in ("dynamic", "dynamic_loss_scale"):
        if name in fields:
            return fields.flag(name)
    # The older static class has only its scale.
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
    """Return the default floor, or the scale if that is already below it."""
    return min(default, max(scale, DynamicScale.min_scale))


def _forgiving(interval: int, finite_steps: int, left: int) -> tuple[float, int]:
    """Return the tolerance and the debt that come closest to a hysteresis.

    The hysteresis is refilled when the scale grows; once used up, no overflow is
    forgiven until then. The tolerance forgives one overflow in as many steps.

    Args:
        interval: The growth interval.
        finite_steps: Finite steps since it began.
        left: The remaining hysteresis; at 1 the next overflow backs off.
    """
    # From 3 on: a tolerance has to be below one half.
    period = max(interval + 1, 3)
    tolerance = 1.0 / period
    # Rounded twice, the inverse of the inverse may exceed the period.
    while math.ceil(1.0 / tolerance) > period:
        tolerance = math.nextafter(tolerance, 1.0)
    return tolerance, 0 if left > 1 else max(0, interval - finite_steps + 1)


READERS: dict[str, Callable[[Fields, Given], Translated]] = {
    "apex": _of_apex,
    "deepspeed": _of_deepspeed,
    "megatron": _of_megatron,
    "fairseq": _of_fairseq,
    "flax": _of_flax,
    "jmp": _of_jmp,
}
