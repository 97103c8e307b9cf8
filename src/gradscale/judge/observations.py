"""Observations beyond the step records: locations, weights, calls of the training loop.

A framework integration makes them in a few sampled steps, or when a step requires it. A
recorded run stores each as an event, so a judge that reads the file has the same
observations as the live judge.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from gradscale.core.formatting import counted, power
from gradscale.judge.history import Episode

# A location without a module and an operation.
OUTSIDE = "the computation outside any module"
# Sampled steps in which a misuse must show, and the share of all that it needs.
MISUSED_STEPS = 3
MISUSED_SHARE = 0.6
# Sampled steps in which gradients must not have been cleared, and those after which a
# window of micro-batches would have ended.
UNCLEARED_LOOKS = 6
WINDOW_LOOKS = 9
# Notes kept on judgements that were not possible.
MOST_UNJUDGED = 8
# Names listed in a finding.
MOST_NAMES = 3
# A norm or a peak that a clip has set varies by less.
CLIPPED_SPREAD = 1.01
# Clipped while scaled, gradients are that much smaller than the scale.
CLIPPED_SHARE = 2.0**-6
# Gradients whose norm shrank by the scale, up to this factor, were divided by it. The
# scale that is known is a few steps old.
DIVIDED = 2.0
DIVIDED_SCALE = 16.0
# Scalers that one optimizer may have had: a second one may continue a checkpoint.
SCALERS = 3
_LARGEST = sys.float_info.max


class Place(NamedTuple):
    """The location of a non-finite value, as observed by module hooks.

    Attributes:
        step: The step of the observation.
        module: The dotted name of the module, as in `named_modules()`.
        direction: "forward" or "backward".
        operation: The operation; empty if unknown.
        said: The location in one line.
        instead: The safe form of a known unsafe pattern; empty if there is none.
        at: Operation and module in words.
        tensor: The non-finite tensor, such as "output"; empty if unknown.
        kind: "nan" or "inf"; empty if unknown.
        loss_finite: Whether the loss of that step was finite; None if unknown.
        peak: The largest finite magnitude among the inputs.
        given: The tensor is part of the batch.
        given_peak: The largest finite magnitude in the batch.
        was_float16: The tensor is infinite, and its finite values are float16 values.
        gain: By how much the weight of the module multiplies independent inputs.
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
    peak: float = 0.0
    given: bool = False
    given_peak: float = 0.0
    was_float16: bool = False
    gain: float = 0.0

    def evidence(self) -> dict[str, Any]:
        """Return the location as evidence of a finding."""
        word = {"nan": "NaN", "inf": "infinity"}.get(self.kind, self.kind)
        named = {f"place_{name}": value for name, value in self._asdict().items()}
        return {"place": self.said, "place_word": word, **named}


def place_of(step: int, data: Mapping[str, Any]) -> Place | None:
    """Return the location that an event describes; None for another event."""
    if not (data.get("found") is True and data.get("direction")):
        return None
    module, pattern = data.get("module"), data.get("pattern")
    direction, operation = str(data["direction"]), str(data.get("operation") or "")
    tensor, kind = str(data.get("tensor") or ""), str(data.get("kind") or "")
    of_class = f" ({data['module_class']})" if data.get("module_class") else ""
    shown = tensor
    if module is None:
        inside = f"{direction} outside any module"
        at = f"{operation} outside any module" if operation else OUTSIDE
        if tensor == "loss":
            inside, shown = "the loss itself, outside any module", ""
            at = "the loss computation after the last module"
        elif tensor == "target":
            inside, shown = "a target of the loss", ""
            at = "the targets of the loss"
    else:
        inside = f"{direction} of {module or 'the model itself'}{of_class}"
        at = f"module '{module}'{of_class}" if module else "the model"
        at = f"{operation} in {at}" if operation else at
    said = ", ".join(part for part in (inside, operation, shown) if part)
    if count := _count(data, "count"):
        bad = "NaN" if kind == "nan" else kind or "not finite"
        said += f": {count:,} of {_count(data, 'elements') or 0:,} {bad}"
    instead = pattern.get("instead", "") if isinstance(pattern, Mapping) else ""
    loss_finite = data.get("loss_finite")
    return Place(
        step=step,
        module=str(module or ""),
        direction=direction,
        operation=operation,
        said=said,
        instead=str(instead),
        at=at,
        tensor=tensor,
        kind=kind,
        loss_finite=loss_finite if isinstance(loss_finite, bool) else None,
        peak=_number(data, "peak"),
        # Targets, and inputs of the model before any module has run.
        given=tensor == "target"
        or data.get("given", tensor == "input" and not module) is True,
        given_peak=_number(data, "given_peak"),
        was_float16=data.get("was_float16") is True,
        gain=_number(data, "gain"),
    )


@dataclass(slots=True)
class Observations:
    """The observations up to the present step. Of bounded size.

    Attributes:
        loop: Counts over the sampled steps, as of the last of them: `looks`, and in
            how many of them each misuse showed.
        setup_facts: Facts about model and optimizers.
        missing: Parameters with a gradient that no optimizer has.
        casts: Layers whose gradients a cast to float16 has flushed to 0, and layers
            whose gradients were 0 before it.
        weights: The last observation of weights and learning rate.
        scalers: Scalers created one after another while optimizers continued from
            their last state.
        unused: Scaled losses without a following update.
        not_judged: Judgements that were not possible, with reasons; one sentence each.
        since: The step of the first observation of each kind.
        first, last: The locations of the first and last non-finite value, by whether
            the loss was finite.
    """

    loop: Mapping[str, Any] = field(default_factory=dict)
    setup_facts: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, Any] = field(default_factory=dict)
    casts: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    scalers: int = 1
    unused: int = 0
    not_judged: tuple[str, ...] = ()
    since: dict[str, int] = field(default_factory=dict)
    last: dict[bool, Place] = field(default_factory=dict)
    first: dict[bool, Place] = field(default_factory=dict)

    def add(self, step: int, data: Mapping[str, Any]) -> None:
        """Add the data of an event; events other than observations are ignored."""
        place = place_of(step, data)
        if place is not None:
            finite = place.loss_finite
            if finite is None:
                # After a non-finite loss the forward pass has the first location.
                finite = place.direction == "backward"
            if finite not in self.last or place.step > self.last[finite].step + 1:
                self.first[finite] = place
            self.last[finite] = place
        kind = data.get("observed")
        if not isinstance(kind, str):
            return
        self.since.setdefault(kind, step)
        if kind == "loop":
            self.loop = data
        elif kind == "setup":
            self.setup_facts = data
        elif kind == "missing":
            self.missing = data
        elif kind == "casts":
            self.casts = data
        elif kind == "weights":
            self.weights = data
        elif kind == "scaler" and data.get("same_optimizer"):
            self.scalers += 1
        elif kind == "not_judged" and len(self.not_judged) < MOST_UNJUDGED:
            self.not_judged += (str(data.get("what", "")),)
        elif kind == "end":
            self.unused = int(_number(data, "unused_losses"))

    @property
    def uses_float16(self) -> bool:
        """False if nothing is float16, as far as it was observed."""
        return self.setup_facts.get("float16") is not False

    def is_flushed(self, layer: str, amax: float) -> bool | None:
        """Return whether a cast flushes the gradients of a layer; None if unknown.

        Gradients of a layer without a cast of its own pass that of another layer.

        Args:
            layer: Its name.
            amax: The largest gradient of all; 0 if all are behind such a cast.
        """
        flushed = _names(self.casts, "flushed")
        reached = layer not in _names(self.casts, "unreached") or amax == 0.0
        if flushed and (layer in flushed or reached):
            return True
        return None if reached else False

    @property
    def cleared_early(self) -> int:
        """Sampled steps whose gradients were cleared after backward."""
        return int(_number(self.loop, "cleared_early"))

    def setup(self) -> dict[str, Any]:
        """Return evidence on model, optimizers and direct steps."""
        return {
            "float16_params": int(_number(self.setup_facts, "float16_params")),
            "direct_steps": int(
                _number(self.loop, "direct_steps")
                + _number(self.loop, "unguarded_steps")
            ),
        }

    def of_episode(self, episode: Episode) -> dict[str, Any]:
        """Return the evidence on an episode."""
        seen: dict[str, Any] = {"at_rate": ""}
        place = self._place(episode)
        if place is not None:
            seen |= place.evidence()
        if self._shown("uncleared") and not self._sometimes():
            seen["uncleared"] = True
            seen["uncleared_part"] = self.uncleared_part
        look = self.weights
        if look:
            rates = look.get("rates")
            known = map(_finite, rates if isinstance(rates, list) else ())
            highest = max((rate for rate in known if rate is not None), default=None)
            if highest is not None:
                seen["rate"] = highest
                seen["at_rate"] = f" (lr={highest:g})"
            first, now = _number(look, "first_peak"), _number(look, "peak")
            if first > 0.0:
                seen |= {"weight_from": first, "weight_to": now}
                seen["beyond_rate"] = look.get("beyond_rate") is True
                seen["weight_name"] = str(look.get("largest", ""))
            if look.get("buffer"):
                seen["buffers"] = str(look["buffer"])
        return seen

    def excludes_scale(self, episode: Episode) -> bool:
        """Return whether a location in an episode is unrelated to the scale.

        In a step with a finite loss, the forward pass produced a non-finite value.
        """
        last = self.last.get(True)
        if last is None or last.step < episode.since:
            return False
        return last.direction == "forward"

    def _place(self, episode: Episode) -> Place | None:
        """Return the first location of an episode, else the last one of its kind."""
        finite = not episode.losses
        last = self.last.get(finite)
        if last is None and episode.gradients and episode.losses:
            last = self.last.get(not finite)
            finite = not finite
        if last is None:
            return None
        first = self.first[finite]
        return first if first.step >= episode.since else last

    def misused(self, *, ended: bool = False) -> Iterator[str]:
        """Yield the codes of all misuses that the observations show.

        Args:
            ended: No further observation will contradict these.
        """
        for code, row in MISUSES.items():
            early = code == "GS116" and _number(self.loop, "looks") < WINDOW_LOOKS
            if row.holds(self) and (ended or not early):
                yield code

    def _shown(self, name: str) -> bool:
        """Return whether a misuse showed in most of the sampled steps."""
        looks, times = _number(self.loop, "looks"), _number(self.loop, name)
        return times >= MISUSED_STEPS and times >= MISUSED_SHARE * looks

    def _uncleared(self) -> bool:
        enough = _number(self.loop, "looks") >= UNCLEARED_LOOKS
        return enough and self._shown("uncleared")

    @property
    def uncleared_part(self) -> str:
        """The part of the model whose gradients are not cleared; empty for all."""
        names = _names(self.loop, "left")
        parts = zip(*(name.split(".") for name in names), strict=False)
        common = takewhile(lambda part: len(set(part)) == 1, parts)
        return ".".join(part[0] for part in common) or (names[0] if names else "")

    def _sometimes(self) -> bool:
        """Gradients were cleared before some of the sampled steps, or between them."""
        looks, renewed = _number(self.loop, "looks"), _number(self.loop, "renewed")
        return _number(self.loop, "uncleared") < looks or renewed > 0.0

    def _stepped_in_window(self) -> bool:
        # Gradients that are unscaled in the middle of a window count as used.
        used = _number(self.loop, "late_backward")
        return self._uncleared() and self._sometimes() and not used

    def _repeated(self) -> bool:
        return _number(self.loop, "repeated_updates") >= MISUSED_STEPS

    def _clipped(self) -> bool:
        norm, scale = _number(self.loop, "norm"), _number(self.loop, "scale")
        small = 0.0 < norm <= CLIPPED_SHARE * scale
        return self._shown("written") and self._constant() and small

    def _constant(self) -> bool:
        """Norm or peak of the gradients were the same in all sampled steps."""
        sizes = (_number(self.loop, name) for name in ("norm_spread", "peak_spread"))
        return any(1.0 <= spread <= CLIPPED_SPREAD for spread in sizes)

    def _zeroed(self) -> bool:
        zero = self.loop.get("peak") == 0.0
        return self._shown("cleared_early") or (self._shown("written") and zero)

    def _divided(self) -> bool:
        scale = _number(self.loop, "scale")
        shrunk = _number(self.loop, "shrunk")
        by_scale = scale / DIVIDED <= shrunk <= DIVIDED * scale >= DIVIDED_SCALE
        return self._shown("written") and by_scale and not self._constant()


class Misuse(NamedTuple):
    """A misuse of the scaler.

    Attributes:
        holds: Whether observations show it.
        what: One sentence without a full stop; names in braces are filled in from the
            evidence and from `words`.
        cost: What it costs; likewise.
        evidence: Returns the evidence.
        words: Returns parts of the sentences.
        kind: The observation that shows it.
    """

    holds: Callable[[Observations], bool]
    what: str
    cost: str
    evidence: Callable[[Observations], dict[str, Any]] = lambda seen: {}
    words: Callable[[Observations], dict[str, Any]] = lambda seen: {}
    kind: str = "loop"

    def texts(self, seen: Observations) -> tuple[str, str]:
        """Return `what` and `cost`, filled in."""
        known = {**self.evidence(seen), **self.words(seen)}
        return self.what.format_map(known), self.cost.format_map(known)


def _loop_scale(seen: Observations) -> dict[str, Any]:
    return {"scale": power(_number(seen.loop, "scale"))}


def _clip(seen: Observations) -> dict[str, Any]:
    return {"norm": _number(seen.loop, "norm"), **_loop_scale(seen)}


def _unscaled_norm(seen: Observations) -> dict[str, Any]:
    norm, scale = _number(seen.loop, "norm"), _number(seen.loop, "scale")
    return {"unscaled_norm": norm / scale if scale else 0.0}


def _divided_peak(seen: Observations) -> dict[str, Any]:
    peak = {"peak": _number(seen.loop, "peak")} if seen._divided() else {}
    return {**peak, **_loop_scale(seen)}


def _how_divided(seen: Observations) -> dict[str, Any]:
    if seen._divided():
        how = "other code writes to them between backward and the scaler, and the "
        how += f"largest is {_number(seen.loop, 'peak'):.3g} although S = "
        return {"how": how + _loop_scale(seen)["scale"]}
    return {"how": "after unscale_() other code divides them by the scale again"}


def _number_of(key: str) -> Callable[[Observations], dict[str, Any]]:
    return lambda seen: {key: int(_number(seen.loop, key))}


def _times(key: str, noun: str) -> Callable[[Observations], dict[str, Any]]:
    return lambda seen: {"times": counted(int(_number(seen.loop, key)), noun)}


def _missing(seen: Observations) -> dict[str, Any]:
    names = _names(seen.missing, "names")
    number = int(_number(seen.missing, "count")) or len(names)
    return {"parameter": names[0], "missing": number}


def _missing_words(seen: Observations) -> dict[str, Any]:
    number, names = _missing(seen)["missing"], _names(seen.missing, "names")
    shown = ", ".join(names[:MOST_NAMES]) + (", ..." if number > MOST_NAMES else "")
    verb = "has a gradient and is" if number == 1 else "have gradients and are"
    return {"which": f"{counted(number, 'parameter')} {verb}", "names": shown}


def _float16(seen: Observations) -> dict[str, Any]:
    return {
        "parameter": str(seen.setup_facts.get("float16_param", "")),
        "float16_params": int(_number(seen.setup_facts, "float16_params")),
    }


def _float16_words(seen: Observations) -> dict[str, Any]:
    number = _float16(seen)["float16_params"]
    verb = "is" if number == 1 else "are"
    return {"which": f"{counted(number, 'trainable parameter')} {verb}"}


def _how_often(seen: Observations) -> dict[str, Any]:
    if seen._repeated():
        return {
            "how": "update() is called again before another loss is scaled",
            "effect": "an overflow lowers the scale several times, and the optimizers "
            "of one backward pass may be skipped differently",
        }
    return {
        "how": "step() and update() are called several times before the gradients are "
        "cleared",
        "effect": "each step uses the gradients of the steps before it again",
    }


MISUSES: dict[str, Misuse] = {
    "GS112": Misuse(
        Observations._clipped,
        "gradients are clipped while they are scaled: their norm is always {norm:.3g} "
        "at S = {scale}, which is {unscaled_norm:.2g} once unscaled",
        "every update is far smaller than it should be",
        _clip,
        _unscaled_norm,
    ),
    "GS113": Misuse(
        lambda seen: seen._divided() or _number(seen.loop, "divided_again") > 1,
        "gradients are unscaled twice: {how}",
        "every update is {scale} times too small",
        _divided_peak,
        _how_divided,
    ),
    "GS114": Misuse(
        lambda seen: seen._shown("unscaled"),
        "backward() runs on a loss that was not scaled, and the gradients are divided "
        "by S = {scale} all the same",
        "updates are {scale} times too small, and small gradients underflow",
        _loop_scale,
    ),
    "GS115": Misuse(
        lambda seen: _number(seen.loop, "direct_steps") > 0,
        "optimizer.step() was called directly, at least {times}",
        "such steps use scaled gradients, or gradients that are not finite",
        _number_of("direct_steps"),
        _times("direct_steps", "time"),
    ),
    "GS104": Misuse(
        lambda seen: _number(seen.loop, "late_backward") > 0,
        "backward() adds scaled gradients to gradients that are already unscaled, in "
        "at least {times}",
        "the sum is neither scaled nor unscaled, and the step is wrong",
        _number_of("late_backward"),
        _times("late_backward", "iteration"),
    ),
    "GS122": Misuse(
        lambda seen: seen._repeated() or seen._stepped_in_window(),
        "{how}",
        "{effect}",
        lambda seen: {"repeated_updates": True} if seen._repeated() else {},
        _how_often,
    ),
    "GS116": Misuse(
        lambda seen: seen._uncleared() and not seen._sometimes(),
        "gradients are not cleared between steps: backward adds to those of the step "
        "before",
        "one non-finite gradient makes every later step fail",
        lambda seen: {"uncleared_part": seen.uncleared_part},
    ),
    "GS117": Misuse(
        Observations._zeroed,
        "gradients are cleared between backward and the step",
        "nothing is learned",
        lambda seen: {"cleared_early": seen.cleared_early},
    ),
    "GS118": Misuse(
        lambda seen: seen.scalers >= SCALERS,
        "{new} new scalers were made while training went on",
        "each begins at init_scale again: the scale that was found is lost",
        lambda seen: {"scalers": seen.scalers},
        lambda seen: {"new": seen.scalers - 1},
        "scaler",
    ),
    "GS119": Misuse(
        lambda seen: bool(_names(seen.missing, "names")),
        "{which} in no optimizer: {names}",
        "these parameters never change",
        _missing,
        _missing_words,
        "missing",
    ),
    "GS120": Misuse(
        lambda seen: _number(seen.setup_facts, "float16_params") > 0,
        "{which} float16, without float32 copies",
        "updates below 2^-11 of a weight are rounded away",
        _float16,
        _float16_words,
        "setup",
    ),
    "GS123": Misuse(
        lambda seen: seen.unused > 0,
        "{unused_losses} losses were scaled, and no step() and update() followed",
        "no step was taken for them, and the scale stays as it is",
        lambda seen: {"unused_losses": seen.unused},
        kind="end",
    ),
    "GS121": Misuse(
        lambda seen: seen.setup_facts.get("float16") is False,
        "nothing is float16: the loss is computed in {dtype} alone",
        "scaling has no effect; the run is not faster than without it",
        words=lambda seen: {"dtype": seen.setup_facts.get("dtype", "float32")},
        kind="setup",
    ),
}


def _names(data: Mapping[str, Any], key: str) -> list[str]:
    names = data.get(key)
    return [str(name) for name in names] if isinstance(names, list) else []


def _number(data: Mapping[str, Any], key: str) -> float:
    """Return a number of an event, which may come from a file of any origin."""
    return _finite(data.get(key)) or 0.0


def _finite(value: object) -> float | None:
    """Return a value as a float; None if it is no finite number."""
    if not isinstance(value, (int, float)) or not -_LARGEST <= value <= _LARGEST:
        return None
    return float(value)


def _count(data: Mapping[str, Any], name: str) -> int | None:
    value = data.get(name)
    return value if isinstance(value, int) else None
