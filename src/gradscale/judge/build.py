"""The findings of a judge, each made from the facts it stands on."""

import math
from typing import Any

from gradscale.core.formatting import power
from gradscale.judge.advice import advice_for
from gradscale.judge.facts import Facts, kind_of, trend, usual_before, who
from gradscale.judge.findings import Finding
from gradscale.judge.remedies import widespread
from gradscale.judge.trend import Alarm, exponent


def calibrated(facts: Facts) -> Finding:
    """Say that the scale has found its place."""
    course, scale = facts.course, power(facts.record.scale)
    first, skips = power(course.first_scale), course.early_skips
    plural = "" if skips == 1 else "s"
    seen = {"scale_from": first, "scale": scale, "skips": skips}
    what = f"calibrated: S {first} -> {scale} after {skips} skip{plural} (normal)"
    cost = f"{_batches(skips)} lost"
    return _finding("GS001", facts, course.first_step, what, cost, seen)


def idle(facts: Facts) -> Finding:
    """Say that there is nothing to learn from."""
    run = facts.course.none
    seen = {"steps": run.length, "gradients_before": facts.course.steps > 0}
    what = f"no parameter has had a gradient for {run.length} steps"
    return _finding("GS103", facts, run.since, what, "nothing is learned", seen)


def crowded(facts: Facts, skips: int, steps: int, since: int) -> Finding:
    """Say that too many steps are skipped."""
    record, slope = facts.record, facts.slope
    fall = slope.usual - exponent(record.scale)
    seen = {
        "steps": skips,
        "of": steps,
        "scale": power(record.scale),
        "at_floor": record.floor_steps > 0,
        "falling": fall >= 2.0,
        **who(facts),
        **trend(facts, since),
    }
    what = f"{skips} of {steps} steps were skipped, at S = {power(record.scale)} now"
    cost = f"{_batches(skips)} of {steps} lost"
    return _finding("GS201", facts, since, what, cost, seen)


def fixed(facts: Facts, skips: int, steps: int, since: int) -> Finding:
    """Say that a scale which does not move is too high."""
    scale = power(facts.record.scale)
    seen = {
        "steps": skips,
        "of": steps,
        "scale": scale,
        **who(facts),
        **trend(facts, since),
    }
    what = f"{skips} of {steps} steps were skipped and S stays at {scale}"
    cost = f"{_batches(skips)} of {steps} lost"
    return _finding("GS205", facts, since, what, cost, seen)


def collapse(facts: Facts) -> Finding:
    """Say that the scale is at its floor and nothing fits."""
    record, course = facts.record, facts.course
    run = course.bad if course.bad.length else course.loss
    since = usual_before(facts, run.since if run.length else record.step)
    seen = {
        "scale": power(record.scale),
        "floor_steps": record.floor_steps,
        "loss_finite": record.loss_finite,
        "nan": record.nan,
        **who(facts),
        **trend(facts, since),
    }
    # Under a loss that is not finite the gradients are so anyway, with or without NaN.
    kind = kind_of(run) if course.bad.length else "not finite"
    what = (
        f"S is at its floor of {power(record.scale)} and gradients were {kind} there, "
        f"{record.floor_steps} steps in a row"
    )
    lost = _batches(max(run.length, record.floor_steps))
    cost = f"no step was taken; {lost} lost"
    return _finding("GS202", facts, since, what, cost, seen, hopeless=True)


def loss(
    facts: Facts, steps: int, times: int, *, over: bool, hopeless: bool
) -> Finding:
    """Say that the loss was not finite before it was scaled.

    Args:
        facts: What it stands on.
        steps: How many losses in a row.
        times: Which time it is that there are some.
        over: The loss is finite again.
        hopeless: It will not be finite again.
    """
    course, run = facts.course, facts.course.loss
    word = course.loss_kind or "not finite"
    seen = {
        "loss": word,
        "steps": steps,
        "applied": run.applied,
        "times": times,
        "over": over,
        "finite_before": course.loss_known,
        "scale_from": power(run.origin),
        "scale": power(run.last),
        **trend(facts, run.since),
    }
    row = f"{steps} steps in a row" if steps > 1 else "1 step"
    what = f"the loss is {word} before scaling, {row}; no lower scale can help"
    cost = f"{_batches(steps - run.applied)} lost"
    cost += "; running statistics may have taken it in"
    if run.applied == steps:
        cost = "the value of the loss is of no use; the steps were taken"
    elif run.applied:
        cost += f"; {run.applied} of {steps} steps were taken"
    return _finding("GS203", facts, run.since, what, cost, seen, hopeless=hopeless)


def norm(facts: Facts, times: int) -> Finding:
    """Say that the gradients are finite and their norm is not."""
    record = facts.record
    scale = power(record.scale)
    seen = {"times": times, "scale": scale, **trend(facts, record.step)}
    what = "every gradient is finite and their norm is beyond float32"
    return _finding("GS204", facts, record.step, what, "1 batch lost", seen)


def scaled_loss(facts: Facts, times: int) -> Finding:
    """Say that the loss left its dtype when it was scaled."""
    record = facts.record
    seen: dict[str, Any] = {"scale": power(record.scale), "times": times}
    if record.loss is not None and math.isfinite(record.loss) and record.loss != 0.0:
        seen["loss"] = record.loss
        most = math.floor(exponent(65504.0) - exponent(abs(record.loss)))
        seen["fits"] = power(2.0**most)
    what = f"the loss is finite and overflows its dtype when scaled by {seen['scale']}"
    cost = "1 batch lost, and S has to stay lower than the gradients need"
    return _finding("GS206", facts, record.step, what, cost, seen)


def weights(facts: Facts) -> Finding:
    """Say that the weights are gone."""
    record = facts.record
    seen = {
        "loss_finite": record.loss_finite,
        "steps_before": facts.course.steps - 1,
        **who(facts),
        **trend(facts, record.step),
    }
    what = "a weight is not finite; every step from here on is lost"
    cost = "the run since the last checkpoint"
    return _finding("GS207", facts, record.step, what, cost, seen, hopeless=True)


def genuine(facts: Facts) -> Finding:
    """Say that gradients are not finite at any scale."""
    record, run = facts.record, facts.course.bad
    bits = exponent(run.origin) - exponent(run.last)
    seen = {
        "nan": run.nan > 0,
        "loss_finite": record.loss_finite,
        "steps": run.length,
        "scale_from": power(run.origin),
        "scale": power(run.last),
        "bits": round(bits, 2),
        **who(facts),
        **trend(facts, run.since),
    }
    what = (
        f"gradients are {kind_of(run)} at any scale: S {power(run.origin)} -> "
        f"{power(run.last)}, {run.length} of {run.length} steps skipped"
    )
    cost = f"no step was taken; {_batches(run.length)} lost"
    return _finding("GS208", facts, run.since, what, cost, seen, hopeless=True)


def underflow(facts: Facts) -> Finding:
    """Say that gradients are too small for float16."""
    record, course = facts.record, facts.course
    scale = power(record.scale)
    run = course.tiny
    seen: dict[str, Any] = {
        "scale": scale,
        "scale_from": power(course.first_scale),
        "fallen": record.scale < course.first_scale,
    }
    what = (
        f"no gradient reaches the normal float16 at S = {scale}, {run.length} steps in "
        "a row"
    )
    if record.lost is not None and course.lost.length:
        run = course.lost
        seen["lost"] = record.lost
        share = f"about {100.0 * record.lost:.0f} % of the gradient elements"
        what = f"{share} are too small for float16 at S = {scale}"
    if 0.0 < record.amax < math.inf:
        headroom = exponent(65504.0) - exponent(record.amax)
        seen["amax"] = record.amax
        seen["headroom_bits"] = round(headroom, 2)
        # Two bits stay free: batches differ.
        seen["room"] = power(record.scale * 2.0 ** max(0, math.floor(headroom) - 2))
    cost = "what is below 2^-24 becomes 0 and is not learned from"
    return _finding("GS209", facts, run.since, what, cost, seen)


def falling(facts: Facts, alarm: Alarm) -> Finding:
    """Say that scale or headroom are on their way down."""
    seen: dict[str, Any] = {
        "signal": alarm.signal,
        "bits": round(alarm.bits, 2),
        "usual_log2": round(alarm.usual, 2),
        "now_log2": round(alarm.now, 2),
        **who(facts),
        **trend(facts, alarm.since),
    }
    steps = alarm.step - alarm.since + 1
    if alarm.signal == "scale":
        what = (
            f"S = {power(facts.record.scale)} is {alarm.bits:.1f} bits below its usual "
            f"2^{alarm.usual:.1f}, within {steps} steps"
        )
        cost = "small gradients are lost first; runs that diverged began like this"
    else:
        seen["headroom_bits"] = round(facts.slope.headroom(), 2)
        what = (
            f"gradients have grown by {alarm.bits:.1f} bits within {steps} steps, "
            f"{seen['headroom_bits']:.1f} bits below 65504"
        )
        cost = "overflow is near"
    return _finding("GS210", facts, alarm.since, what, cost, seen)


def _finding(
    code: str,
    facts: Facts,
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
        step=facts.course.step,
        since=since,
        what=what,
        cost=cost,
        evidence=seen,
        advice=advice_for(code, seen),
        more=f"gradscale explain {code}",
        hopeless=hopeless,
    )


def _where(seen: dict[str, Any]) -> str:
    """Return the first tensor that was not finite, if that says where to look."""
    # Under a loss that is not finite all gradients are, the first as well as the last.
    follows = seen.get("floor_steps") and not seen["loss_finite"]
    return "" if follows or widespread(seen) else str(seen.get("culprit", ""))


def _batches(number: int) -> str:
    return "1 batch" if number == 1 else f"{number} batches"
