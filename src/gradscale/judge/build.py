"""Builds the findings of the judge: text, cost, evidence, advice."""

import math
from typing import Any, NamedTuple

from gradscale.core.formatting import counted, power
from gradscale.core.records import StepRecord
from gradscale.judge.advice import advice_for, widespread
from gradscale.judge.findings import Finding
from gradscale.judge.history import History, Streak
from gradscale.judge.trend import TOP, Alarm, Trend, exponent
from gradscale.judge.verdict_table import BY_CODE

# Bits of margin above the largest gradient in advice to raise the scale.
SPARE_BITS = 2
# log2 of the first power of two that is not a float32.
FLOAT32_TOP = 128.0
# A gradient below the normal float16 range at such a scale is below 2^-22 without it:
# more likely, the loss was not scaled.
PERHAPS_UNSCALED = 2.0**8


class Context(NamedTuple):
    """The arguments of every builder.

    Attributes:
        record: The present step.
        history: The run up to it, this step included.
        trend: Slow averages of scale and gradients before it.
        tensors: The number of gradient tensors of the run; 0 if unknown.
    """

    record: StepRecord
    history: History
    trend: Trend
    tensors: int


def calibrated(context: Context) -> Finding:
    """GS001: calibration is over."""
    history, scale = context.history, power(context.record.scale)
    first, skips = power(history.first_scale), history.early_skips
    plural = "" if skips == 1 else "s"
    seen = {"scale_from": first, "scale": scale, "skips": skips}
    what = f"calibrated: S {first} -> {scale} after {skips} skip{plural} (normal)"
    cost = f"{_batches(skips)} lost"
    return _finding("GS001", context, history.first_step, what, cost, seen)


def no_gradients(context: Context) -> Finding:
    """GS103: no parameter has had a gradient for several steps."""
    run = context.history.none
    seen = {"steps": run.length, "gradients_before": context.history.steps > 0}
    what = f"no parameter has had a gradient for {run.length} steps"
    return _finding("GS103", context, run.since, what, "nothing is learned", seen)


def frequent_skips(context: Context, skips: int, steps: int, since: int) -> Finding:
    """GS201: too many steps of a window were skipped."""
    record, trend = context.record, context.trend
    fall = trend.usual - exponent(record.scale)
    seen = {
        "steps": skips,
        "of": steps,
        "scale": power(record.scale),
        "at_floor": record.floor_steps > 0,
        "falling": fall >= 2.0,
        **_nonfinite_tensors(context),
        **_growth_before(context, since),
    }
    what = f"{skips} of {steps} steps were skipped, now at S = {power(record.scale)}"
    cost = f"{_batches(skips)} of {steps} lost"
    return _finding("GS201", context, since, what, cost, seen)


def fixed_scale(context: Context, skips: int, steps: int, since: int) -> Finding:
    """GS205: steps are skipped and the scale does not move."""
    scale = power(context.record.scale)
    seen = {
        "steps": skips,
        "of": steps,
        "scale": scale,
        **_nonfinite_tensors(context),
        **_growth_before(context, since),
    }
    what = f"{skips} of {steps} steps were skipped while S stays at {scale}"
    cost = f"{_batches(skips)} of {steps} lost"
    return _finding("GS205", context, since, what, cost, seen)


def collapse(context: Context) -> Finding:
    """GS202: the scale is at its floor and gradients are not finite."""
    record, history = context.record, context.history
    run = history.bad if history.bad.length else history.loss
    since = _deviated_at(context, run.since if run.length else record.step)
    seen = {
        "scale": power(record.scale),
        "floor_steps": record.floor_steps,
        "loss_finite": record.loss_finite,
        "nan": record.nan,
        **_nonfinite_tensors(context),
        **_growth_before(context, since),
    }
    # A non-finite loss makes all gradients non-finite, with or without NaN.
    kind = _kind_of(run) if history.bad.length else "not finite"
    what = (
        f"S is at its floor of {power(record.scale)} and gradients are still {kind}, "
        f"{record.floor_steps} steps in a row"
    )
    lost = _batches(max(run.length, record.floor_steps))
    cost = f"no step was applied; {lost} lost"
    return _finding("GS202", context, since, what, cost, seen)


def nonfinite_loss(
    context: Context, steps: int, times: int, *, over: bool, hopeless: bool
) -> Finding:
    """GS203: the loss was not finite before it was scaled.

    Args:
        context: As for every builder.
        steps: Non-finite losses in a row.
        times: The number of this episode, counted from 1.
        over: The loss is finite again.
        hopeless: The run will not recover.
    """
    history, run = context.history, context.history.loss
    word = history.loss_kind or "not finite"
    seen = {
        "loss": word,
        "steps": steps,
        "applied": run.applied,
        "times": times,
        "over": over,
        "finite_before": history.loss_known,
        "scale_from": power(run.origin),
        "scale": power(run.last),
        **_growth_before(context, run.since),
    }
    row = f"{steps} steps in a row" if steps > 1 else "1 step"
    what = f"the loss is {word} before scaling, {row}; no lower scale can help"
    cost = f"{_batches(steps - run.applied)} lost"
    cost += "; BatchNorm statistics may be contaminated"
    if run.applied == steps:
        cost = "the value of the loss is unusable; the steps were applied"
    elif run.applied:
        cost += f"; {run.applied} of {steps} steps were applied"
    return _finding("GS203", context, run.since, what, cost, seen, hopeless=hopeless)


def norm_overflow(context: Context, times: int) -> Finding:
    """GS204: the gradients are finite and their norm is not."""
    record = context.record
    scale = power(record.scale)
    seen = {"times": times, "scale": scale, **_growth_before(context, record.step)}
    what = "every gradient is finite, but their norm overflows float32"
    return _finding("GS204", context, record.step, what, "1 batch lost", seen)


def loss_overflow(context: Context, times: int) -> Finding:
    """GS206: the scaled loss overflowed its dtype."""
    record = context.record
    seen: dict[str, Any] = {"scale": power(record.scale), "times": times}
    if record.loss is not None and math.isfinite(record.loss) and record.loss != 0.0:
        seen["loss"] = record.loss
        size = exponent(abs(record.loss))
        seen["above_float32"] = size + exponent(record.scale) >= FLOAT32_TOP
        top = FLOAT32_TOP if seen["above_float32"] else TOP
        seen["fits"] = power(2.0 ** math.floor(top - size))
    what = f"the loss is finite and overflows its dtype when scaled by {seen['scale']}"
    cost = "1 batch lost; the loss keeps S lower than the gradients need"
    return _finding("GS206", context, record.step, what, cost, seen)


def nonfinite_weights(context: Context) -> Finding:
    """GS207: a weight is not finite."""
    record = context.record
    seen = {
        "loss_finite": record.loss_finite,
        "steps_before": context.history.steps - 1,
        **_nonfinite_tensors(context),
        **_growth_before(context, record.step),
    }
    what = "a weight is not finite; no later step is usable"
    cost = "the run since the last checkpoint"
    return _finding("GS207", context, record.step, what, cost, seen)


def genuine(context: Context) -> Finding:
    """GS208: gradients are not finite at any scale."""
    record, run = context.record, context.history.bad
    bits = exponent(run.origin) - exponent(run.last)
    seen = {
        "nan": run.nan > 0,
        "loss_finite": record.loss_finite,
        "steps": run.length,
        "scale_from": power(run.origin),
        "scale": power(run.last),
        "bits": round(bits, 2),
        **_nonfinite_tensors(context),
        **_growth_before(context, run.since),
    }
    what = (
        f"gradients are {_kind_of(run)} at any scale: S {power(run.origin)} -> "
        f"{power(run.last)}, {run.length} of {run.length} steps skipped"
    )
    cost = f"no step was applied; {_batches(run.length)} lost"
    return _finding("GS208", context, run.since, what, cost, seen)


def underflow(context: Context) -> Finding:
    """GS209: gradients are too small for float16."""
    record, history = context.record, context.history
    scale = power(record.scale)
    run = history.tiny
    seen: dict[str, Any] = {
        "scale": scale,
        "scale_from": power(history.first_scale),
        "fallen": record.scale < history.first_scale,
    }
    what = (
        f"every gradient is below the normal float16 range at S = {scale}, "
        f"{run.length} steps in a row"
    )
    if record.lost is not None and history.lost.length:
        run = history.lost
        seen["lost"] = record.lost
        share = f"about {100.0 * record.lost:.0f} % of the gradient elements"
        what = f"{share} are too small for float16 at S = {scale}"
    elif record.scale >= PERHAPS_UNSCALED:
        seen["perhaps_unscaled"] = True
    if 0.0 < record.amax < math.inf:
        headroom = TOP - exponent(record.amax)
        seen["amax"] = record.amax
        seen["headroom_bits"] = round(headroom, 2)
        spare = max(0, math.floor(headroom) - SPARE_BITS)
        seen["room"] = power(record.scale * 2.0**spare)
    cost = "gradient elements below 2^-25 become 0"
    return _finding("GS209", context, run.since, what, cost, seen)


def falling_scale(context: Context, alarm: Alarm) -> Finding:
    """GS210: the scale or the headroom is falling."""
    seen: dict[str, Any] = {
        "signal": alarm.signal,
        "bits": round(alarm.bits, 2),
        "usual_log2": round(alarm.usual, 2),
        "now_log2": round(alarm.now, 2),
        **_nonfinite_tensors(context),
        **_growth_before(context, alarm.since),
    }
    steps = counted(alarm.step - alarm.since + 1, "step")
    if alarm.signal == "scale":
        what = (
            f"S = {power(context.record.scale)} is {alarm.bits:.1f} bits below its "
            f"usual 2^{alarm.usual:.1f}, within {steps}"
        )
        cost = "small gradients underflow first; runs that diverged began like this"
    else:
        seen["headroom_bits"] = round(context.trend.headroom(), 2)
        what = (
            f"gradients have grown by {alarm.bits:.1f} bits within {steps}, "
            f"now {seen['headroom_bits']:.1f} bits below 65504"
        )
        cost = "overflow is near"
    return _finding("GS210", context, alarm.since, what, cost, seen)


def _finding(
    code: str,
    context: Context,
    since: int,
    what: str,
    cost: str,
    seen: dict[str, Any],
    *,
    hopeless: bool = False,
) -> Finding:
    seen = {"since": since, **seen}
    return Finding(
        code=code,
        where=_where(seen),
        step=context.history.step,
        since=since,
        what=what,
        cost=cost,
        evidence=seen,
        advice=advice_for(code, seen),
        more=f"gradscale explain {code}",
        hopeless=hopeless or BY_CODE[code].hopeless,
    )


def _where(seen: dict[str, Any]) -> str:
    """Return the first tensor that was not finite, if it helps to find the cause."""
    # A non-finite loss makes all gradients non-finite: the first is no evidence.
    follows = seen.get("floor_steps") and not seen["loss_finite"]
    return "" if follows or widespread(seen) else str(seen.get("culprit", ""))


def _batches(number: int) -> str:
    return "1 batch" if number == 1 else f"{number} batches"


def _nonfinite_tensors(context: Context) -> dict[str, Any]:
    """Return the evidence on the tensors that were not finite at the last skip."""
    history = context.history
    seen: dict[str, Any] = {}
    if history.culprit:
        seen = {"culprit": history.culprit, "culprits": history.culprits}
        if context.tensors:
            seen["tensors"] = context.tensors
    return seen


def _growth_before(context: Context, since: int) -> dict[str, Any]:
    """Return the evidence on a loss or gradients that had grown; empty if none had."""
    history = context.history
    if history.soared():
        # No usual value is known this early.
        return {"loss_start": history.loss_start, "loss_last": history.loss_last}
    seen: dict[str, Any] = {}
    if history.rising():
        low, mean, start = history.loss_low, history.loss_mean, history.loss_start
        seen = {"loss_low": low, "loss_mean": mean, "loss_start": start}
    if context.trend.growth() >= 1.0:
        seen["gradients_grown_bits"] = round(context.trend.growth(), 2)
    if seen:
        seen["usual_before"] = _deviated_at(context, since)
    return seen


def _deviated_at(context: Context, since: int) -> int:
    """Return the step at which the scale left its usual range, else `since`."""
    return min(since, context.trend.since) if context.trend.since else since


def _kind_of(run: Streak) -> str:
    """Return the adjective for the non-finite gradients of a streak."""
    if run.nan == run.length:
        return "NaN"
    return "NaN or infinite" if run.nan else "infinite"
