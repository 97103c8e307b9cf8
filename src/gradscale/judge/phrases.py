"""Formats the evidence of a finding as text.

Evidence is a flat table with names for programs. Related names form one phrase, in the
order below; an unknown name is printed with its value.
"""

from collections.abc import Callable, Mapping
from typing import Any

Evidence = Mapping[str, Any]


def in_words(evidence: Evidence) -> str:
    """Return the evidence as phrases, separated by semicolons.

    >>> in_words({"since": 90, "loss": "nan", "recovered": True, "finite_before": True})
    'the loss was NaN, finite before and after'
    >>> in_words({"applied": "x", "floor_steps": 3})
    '3 steps in a row at the floor; applied x'
    """
    left = {name: value for name, value in evidence.items() if not is_silent(name)}
    phrases = []
    for names, phrase in _PHRASES:
        if names[0] not in left:
            continue
        try:
            phrases.append(phrase(left))
        except (KeyError, TypeError, ValueError):
            # Evidence of a file that this phrase does not fit: printed by name.
            continue
        for name in names:
            left.pop(name, None)
    phrases += [f"{name.replace('_', ' ')} {_shown(left[name])}" for name in left]
    return "; ".join(phrase for phrase in phrases if phrase)


def is_silent(name: str) -> bool:
    """Return whether evidence is printed elsewhere, or only for programs."""
    of_place = name.startswith("place_") and name != "place_step"
    return of_place or name in _SILENT


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _loss(seen: Evidence) -> str:
    names = {"nan": "NaN", "inf": "infinite", "not finite": "not finite"}
    loss = f"the loss was {names.get(seen['loss'], _shown(seen['loss']))}"
    before, after = seen.get("finite_before"), seen.get("recovered")
    when = [word for word, holds in (("before", before), ("after", after)) if holds]
    if when:
        return f"{loss}, finite {' and '.join(when)}"
    return f"{loss}, no step was taken before" if before is False else loss


def _taken(seen: Evidence) -> str:
    return (
        f"{seen['applied']} of {seen['steps']} steps applied" if seen["applied"] else ""
    )


def _skips(seen: Evidence) -> str:
    return f"{seen['steps']} of {seen.get('of', seen['steps'])} steps lost"


def _times(seen: Evidence) -> str:
    # With a first and a last step the count is in the first line of the finding.
    counted = seen["times"] > 1 and "first_step" not in seen
    return f"{seen['times']} times" if counted else ""


def _scale(seen: Evidence) -> str:
    scale, first = seen.get("scale"), seen.get("scale_from")
    if scale is None or first in (None, scale):
        return f"S = {scale or first}"
    moved = f"fell by {seen['bits']:g} bits" if seen.get("bits") else "went"
    return f"S {moved} from {first} to {scale}"


def _signal(seen: Evidence) -> str:
    name = "S" if seen["signal"] == "scale" else "the largest gradient"
    usual, now = seen["usual_log2"], seen["now_log2"]
    return f"{name} is usually about 2^{usual:g} and is about 2^{now:g} now"


def _tensors(seen: Evidence) -> str:
    number = seen.get("culprits", 1)
    of = f"{number} of {seen['tensors']}" if seen.get("tensors") else f"{number}"
    plural = "" if of == "1" else "s"
    return f"{of} tensor{plural} not finite, first {seen['culprit']}"


def _rise(seen: Evidence) -> str:
    low, mean, start = (seen.get(n) for n in ("loss_low", "loss_mean", "loss_start"))
    if low is None:
        return f"the loss had risen from {start:.4g} to {seen['loss_last']:.4g}"
    at_first = "" if start is None else f", {start:.4g} at the start"
    return f"the loss had risen from {low:.4g} to {mean:.4g}{at_first}"


def _place(seen: Evidence) -> str:
    return f"observed in step {seen['place_step']}: {seen['place']}"


def _steps_before(seen: Evidence) -> str:
    number = seen["steps_before"]
    return f"{number} earlier step{'' if number == 1 else 's'}"


def _weights(seen: Evidence) -> str:
    first, now = seen["weight_from"], seen["weight_to"]
    return f"largest weight {first:.3g} at first and {now:.3g} now"


def _number_of(words: str, name: str) -> Callable[[Evidence], str]:
    return lambda seen: f"{seen[name]} {words}" if seen[name] else ""


def _either(name: str, yes: str, no: str = "") -> Callable[[Evidence], str]:
    return lambda seen: yes if seen[name] else no


def _filled(text: str) -> Callable[[Evidence], str]:
    return text.format_map


_SILENT = frozenset(
    (
        *("since", "room", "at_rate", "scale_blamed", "fixed", "every", "weight"),
        *("above_float32", "cleared_early", "parameter", "missing", "scalers"),
        *("layer", "perhaps_unscaled", "amplified_bits", "slow", "skips", "norm"),
        *("peak", "late_backward", "unused_losses", "uncleared_part", "beyond_rate"),
        *("weight_name", "batches", "repeated_updates"),
    )
)
# The names of each phrase; it is used if the first of them is present.
_PHRASES: tuple[tuple[tuple[str, ...], Callable[[Evidence], str]], ...] = (
    (("place", "place_step"), _place),
    (("loss", "finite_before", "recovered"), _loss),
    (("value",), _filled("the loss was {value:.4g}")),
    (("loss_value",), _filled("the loss was {loss_value:.4g}")),
    (
        ("nan",),
        _either("nan", "NaN gradients", "infinite gradients, no NaN"),
    ),
    (
        ("loss_finite",),
        _either("loss_finite", "the loss was finite", "the loss was not finite"),
    ),
    (("applied",), _taken),
    (("finite_before",), _either("finite_before", "", "no step was taken before")),
    (("steps", "of"), _skips),
    (("floor_steps",), _filled("{floor_steps} steps in a row at the floor")),
    (("times", "first_step", "last_step"), _times),
    (("mended",), _either("mended", "ten finite steps in a row followed")),
    (("signal", "usual_log2", "now_log2", "bits"), _signal),
    (("scale_from", "scale", "bits", "fallen"), _scale),
    (("bits",), lambda seen: ""),
    (
        ("growths",),
        lambda seen: (
            f"{seen['growths']} right after a growth" if seen["growths"] else ""
        ),
    ),
    (("weight_from", "weight_to"), _weights),
    (("rate",), _filled("learning rate {rate:g}")),
    (("uncleared",), _either("uncleared", "gradients are not cleared")),
    (("buffers",), _filled("the buffer {buffers} is not finite")),
    (("float16_params",), _number_of("float16 weights", "float16_params")),
    (("direct_steps",), _number_of("direct steps", "direct_steps")),
    (("scale",), _scale),
    (("at_floor",), _either("at_floor", "S is at its floor")),
    (("falling",), _either("falling", "S is falling", "S is stable")),
    (("fits",), _filled("in float16 it fits up to S = {fits}")),
    (("lost",), _filled("{lost:.0%} of the elements too small")),
    (("amax",), _filled("largest scaled gradient {amax:.4g}")),
    (("headroom_bits",), _filled("gradients {headroom_bits:.0f} bits below 65504")),
    (("culprit", "culprits", "tensors"), _tensors),
    (("loss_low", "loss_mean", "loss_start"), _rise),
    (("loss_last", "loss_start"), _rise),
    (
        ("gradients_grown_bits",),
        _filled("gradients had grown by {gradients_grown_bits:g} bits"),
    ),
    (("usual_before",), _filled("usual values before step {usual_before}")),
    (("steps_before",), _steps_before),
    (
        ("gradients_before",),
        _either(
            "gradients_before", "there were gradients before", "no gradients so far"
        ),
    ),
)
