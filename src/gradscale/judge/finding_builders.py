"""Builds findings: the evidence, its description and the cost."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradscale.core.formatting import counted, power
from gradscale.core.records import StepRecord
from gradscale.judge.causes import Cause, advice_of, cause_of
from gradscale.judge.findings import Finding, lost_batches
from gradscale.judge.history import (
    AMPLE_BITS,
    VANISHED_LAYER,
    Episode,
    History,
    Scattered,
    Streak,
)
from gradscale.judge.observations import MISUSES, Observations
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
        observations: Observations beyond the step records.
        tensors: The number of gradient tensors of the run; 0 if unknown.
        last_episode: The last episode that has ended.
        framework: The framework whose calls the advice names; empty for none.
    """

    record: StepRecord
    history: History
    trend: Trend
    observations: Observations
    tensors: int
    last_episode: Episode | None
    framework: str


def calibrated(context: Context) -> Finding:
    """GS001: calibration is over."""
    history, scale = context.history, power(context.record.scale)
    first, skips = power(history.first_scale), history.early_skips
    seen = {"scale_from": first, "scale": scale, "skips": skips}
    number = counted(skips, "skip")
    what = f"calibrated: S {first} -> {scale} after {number} (normal)"
    return _finding(
        "GS001", context, history.first_step, what, lost_batches(skips), seen
    )


def amplified(context: Context) -> Finding:
    """GS210: calibration is over, at a scale that only huge gradients need."""
    history, scale = context.history, power(context.record.scale)
    seen = {
        "scale_from": power(history.first_scale),
        "scale": scale,
        "skips": history.early_skips,
        "amplified_bits": round(history.amplification(), 2),
        "loss_value": history.loss_last,
        **_last_tensors(context, None),
    }
    what = (
        f"S = {scale} after {counted(history.early_skips, 'skip')}: gradients are "
        f"2^{seen['amplified_bits']:.0f} times larger than the loss"
    )
    skips = lost_batches(history.early_skips)
    cost = f"{skips}; small gradients underflow at so low a scale"
    return _finding("GS210", context, history.first_step, what, cost, seen)


def no_gradients(context: Context) -> Finding:
    """GS103: no parameter has had a gradient for several steps."""
    run = context.history.no_gradients
    seen = {
        "steps": run.length,
        "gradients_before": context.history.steps > 0,
        "cleared_early": context.observations.cleared_early > 0,
    }
    what = f"no parameter has had a gradient for {run.length} steps"
    return _finding("GS103", context, run.since, what, "nothing is learned", seen)


def nonfinite_weights(context: Context, episode: Episode) -> Finding:
    """GS207: a weight is not finite."""
    seen = {
        "weight": episode.culprit,
        "loss_finite": context.record.loss_finite,
        "steps_before": context.history.steps - 1,
        **_tensors(context, episode),
        **context.observations.setup(),
    }
    what = "a weight is not finite; no later step is usable"
    cost = "the run since the last checkpoint"
    return _finding("GS207", context, episode.since, what, cost, seen)


def collapse(context: Context, episode: Episode) -> Finding:
    """GS202: the scale is at its floor and steps are still lost."""
    record = context.record
    floor = power(record.scale)
    seen = {**_of_episode(context, episode), "floor_steps": record.floor_steps}
    if episode.bits >= FAR_BITS or 2 * episode.headroom_skips > episode.lost:
        seen["scale_blamed"] = False
    elif seen.get("scale_blamed"):
        seen["at_floor"] = True
    kind = _kind_of(episode)
    subject = "the loss is" if "loss" in seen else "gradients are"
    what = (
        f"S is at its floor of {floor} and {subject} still {kind}, "
        f"{record.floor_steps} steps in a row"
    )
    cost = cost_of("GS202", episode)
    return _finding("GS202", context, episode.since, what, cost, seen)


def nonfinite_loss(
    context: Context, episode: Episode, *, recovered: Scattered | None, hopeless: bool
) -> Finding:
    """GS203: the loss was not finite before it was scaled.

    Args:
        context: As for every builder.
        episode: The present episode.
        recovered: All such episodes that the run recovered from, this one included;
            None if it has not.
        hopeless: The run will not recover.
    """
    seen = _of_episode(context, episode)
    if recovered is not None:
        seen |= {"recovered": True, "times": recovered.times, "every": recovered.every}
    word = seen["loss"] if seen["loss"] == "not finite" else _kind_of(episode)
    row = _in_steps(episode.losses, episode.steps)
    if recovered is not None and recovered.times > 1:
        row = f"in {recovered.times} episodes since step {recovered.since}"
    what = f"the loss is {word} before scaling, {row}; no lower scale can help"
    since = episode.since if recovered is None else recovered.since
    cost = cost_of("GS203", episode)
    if recovered is not None and recovered.times > 1:
        cost = lost_batches(recovered.lost)
    return _finding("GS203", context, since, what, cost, seen, hopeless=hopeless)


def genuine(context: Context, episode: Episode) -> Finding:
    """GS208: gradients are not finite at any scale."""
    seen = {**_of_episode(context, episode), "scale_blamed": False}
    first, last = power(episode.row_from), power(episode.scale)
    number = episode.gradient_row
    what = (
        f"gradients are {_kind_of(episode)} at any scale: S {first} -> {last}, "
        f"{number} of {number} steps skipped"
    )
    cost = cost_of("GS208", episode)
    return _finding("GS208", context, episode.since, what, cost, seen)


def cost_of(code: str, episode: Episode) -> str:
    """Return what an episode has cost so far.

    Args:
        code: GS202, GS203 or GS208.
        episode: It may go on after the finding.
    """
    cost = lost_batches(episode.lost - episode.applied)
    if code != "GS203":
        return cost if episode.taken else f"no step was applied; {cost}"
    if episode.applied == episode.lost:
        return "the value of the loss is unusable; the steps were applied"
    if episode.applied:
        cost += f"; {episode.applied} of {episode.lost} steps were applied"
    return cost


class Reported:
    """The findings of a run so far, each with the episode that it is about."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Finding, Episode | None]] = []

    def add(self, findings: Iterable[Finding], episode: Episode | None) -> None:
        """Add the findings of one step, made in an episode that may go on."""
        self._pairs += [(finding, episode) for finding in findings]

    def up_to_now(self) -> list[Finding]:
        """Return the findings in order, with the costs of their episodes up to now."""
        return [_up_to_now(finding, episode) for finding, episode in self._pairs]


def _up_to_now(finding: Finding, episode: Episode | None) -> Finding:
    ongoing = finding.code in ("GS202", "GS203", "GS208")
    if episode is None or not ongoing or finding.evidence.get("recovered"):
        return finding
    seen = {**finding.evidence, "batches": episode.lost - episode.applied}
    return finding._replace(cost=cost_of(finding.code, episode), evidence=seen)


def with_headroom(context: Context, episode: Episode, found: Scattered) -> Finding:
    """GS211: gradients are occasionally not finite, and the scale is not the cause."""
    # After the last of them, unless it has grown since.
    lowest = min(found.lowest, context.record.scale)
    seen = {
        **_of_episode(context, episode),
        "scale_blamed": False,
        "times": found.times,
        "nan": found.nan > 0,
        "every": found.every,
        "headroom_bits": _rounded(found.headroom),
        "scale_from": power(found.highest),
        "scale": power(lowest),
        "bits": exponent(found.highest) - exponent(lowest),
    }
    kind = "NaN" if found.nan == found.times else "NaN or infinite"
    kind = kind if found.nan else "infinite"
    spare = found.headroom is not None and found.headroom >= NEAR_BITS
    room = f" with {found.headroom:.0f} bits of headroom" if spare else ""
    what = (
        f"gradients were {kind} in {counted(found.lost, 'step')}{room}: the scale is "
        "not the cause"
    )
    cost = f"{lost_batches(found.lost)}; S fell by {seen['bits']:.0f} bits for nothing"
    seen = {name: value for name, value in seen.items() if value is not None}
    return _finding("GS211", context, found.since, what, cost, seen)


def frequent_skips(
    context: Context, episode: Episode, counts: "Window", *, fixed: bool
) -> Finding:
    """GS201, GS205: too many steps of a window were skipped.

    Args:
        context: As for every builder.
        episode: The present episode.
        counts: Of the window.
        fixed: The scale stayed the same.
    """
    record, scale = context.record, power(context.record.scale)
    fall = context.trend.usual - exponent(record.scale)
    skips, steps = counts.skips, counts.steps
    seen = {
        **_of_episode(context, episode),
        "steps": skips,
        "of": steps,
        "scale": scale,
        "at_floor": record.floor_steps > 0,
        "falling": fall >= 2.0,
        "growths": counts.growths if counts.growths >= skips // 4 else 0,
        "fixed": fixed,
    }
    blamed = scale_is_blamed(episode) or bool(seen["growths"])
    # At a fixed scale, a later step shows the available headroom.
    with_headroom = 2 * episode.headroom_skips > episode.lost
    seen["slow"] = context.history.taken == 0
    seen["scale_blamed"] = (fixed or blamed) and not with_headroom
    still = f"while S stays at {scale}" if fixed else f"now at S = {scale}"
    what = f"{skips} of {steps} steps were skipped, {still}"
    cost = f"{lost_batches(skips)} of {steps}"
    code = "GS205" if fixed else "GS201"
    return _finding(code, context, counts.since, what, cost, seen)


@dataclass(slots=True)
class Window:
    """Skips in a window of steps.

    Attributes:
        since: The first skip.
        before: Steps of the run before it.
        steps: Steps from the first skip to the last.
        skips: Overflows among them.
        same_scale: Those at the scale of the one before.
        growths: Those right after a growth of the scale.
        last_scale: The scale of the last of them.
    """

    since: int = 0
    before: int = 0
    steps: int = 0
    skips: int = 0
    same_scale: int = 0
    growths: int = 0
    last_scale: float = 0.0


def norm_overflow(context: Context, episode: Episode, times: int) -> Finding:
    """GS204: the gradients are finite and their norm is not."""
    scale = power(context.record.scale)
    seen = {"times": times, "scale": scale, **_growth_before(context, episode.since)}
    what = "every gradient is finite, but their norm overflows float32"
    return _finding("GS204", context, episode.since, what, lost_batches(1), seen)


def loss_overflow(context: Context, episode: Episode, times: int) -> Finding:
    """GS206: the scaled loss overflowed its dtype."""
    record = context.record
    seen: dict[str, Any] = {"scale": power(record.scale), "times": times}
    if record.loss is not None and math.isfinite(record.loss) and record.loss != 0.0:
        seen["value"] = record.loss
        size = exponent(abs(record.loss))
        seen["above_float32"] = size + exponent(record.scale) >= FLOAT32_TOP
        top = FLOAT32_TOP if seen["above_float32"] else TOP
        seen["fits"] = power(2.0 ** math.floor(top - size))
    what = f"the loss is finite and overflows its dtype when scaled by {seen['scale']}"
    cost = f"{lost_batches(1)}; the loss keeps S lower than the gradients need"
    return _finding("GS206", context, record.step, what, cost, seen)


def is_nothing_left(history: History, record: StepRecord) -> bool:
    """Return whether every gradient of a sampled step is 0, at a scale this low.

    In several samples, with a loss that is not 0: where a loss has vanished, so have
    its gradients.
    """
    sampled = record.lost is not None and history.layer_samples >= VANISHED_LAYER
    nothing = sampled and record.amax == 0.0 and record.scale <= NO_SCALE
    return nothing and record.loss not in (None, 0.0)


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
    nothing = is_nothing_left(history, record)
    if history.layer and not nothing:
        seen["layer"] = history.layer
    flushed = context.observations.is_flushed(history.layer, record.amax)
    if nothing:
        run = Streak(history.layer_samples, history.layer_since)
        what = f"every gradient is exactly 0 at S = {scale}"
    elif history.layer and (flushed or history.layer_sinking >= VANISHED_LAYER):
        run = Streak(history.layer_samples, history.layer_since)
        what = f"all gradients of {history.layer} are 0 or lost at S = {scale}"
    elif record.lost is not None and history.lost.length:
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


def falling_scale(context: Context, episode: Episode | None, alarm: Alarm) -> Finding:
    """GS210: the scale or the headroom is falling."""
    seen: dict[str, Any] = {
        "signal": alarm.signal,
        "bits": round(alarm.bits, 2),
        "usual_log2": round(alarm.usual, 2),
        "now_log2": round(alarm.now, 2),
        **_last_tensors(context, episode),
        **_growth_before(context, alarm.since),
    }
    steps = counted(alarm.step - alarm.since + 1, "step")
    if alarm.signal == "scale":
        what = (
            f"S = {power(context.record.scale)} is {alarm.bits:.1f} bits below its "
            f"usual 2^{alarm.usual:.1f}, within {steps}"
        )
        cost = "small gradients underflow first; runs that diverged began like this"
    elif alarm.signal == "gradients":
        seen["gradients_grown_bits"] = seen["bits"]
        seen["scale_from"] = power(context.history.fitting_scale)
        seen["scale"] = power(context.record.scale)
        seen.setdefault("usual_before", alarm.since)
        what = f"S fell from {seen['scale_from']} to {seen['scale']}"
        cost = "small gradients underflow at so low a scale"
    else:
        seen["headroom_bits"] = round(context.trend.headroom(), 2)
        what = f"only {seen['headroom_bits']:.1f} bits are left below 65504"
        seen["gradients_grown_bits"] = seen["bits"]
        cost = "overflow is near"
    return _finding("GS210", context, alarm.since, what, cost, seen)


def misuse(context: Context, code: str) -> Finding:
    """A code of `MISUSES`: the training loop uses the scaler in a wrong way."""
    row, observations = MISUSES[code], context.observations
    what, cost = row.texts(observations)
    since, seen = observations.since[row.kind], row.evidence(observations)
    return _finding(code, context, since, what, cost, seen)


def scale_is_blamed(episode: Episode) -> bool:
    """Return whether the scale caused an episode of non-finite gradients. Pure.

    A scale that is too high shows in one of three ways: the gradients of the steps
    before were close to 65504, the scale had just been raised or was being found, or
    the gradients fit once it was lower, and then were close to 65504.
    """
    # Not ruled out where the gradients were not read.
    headroom = episode.headroom
    if episode.scale_excluded:
        return False
    if episode.raised or headroom is None or headroom < NEAR_BITS:
        return True
    return episode.new_scale and headroom < AMPLE_BITS


# Bits of headroom below which a larger batch may overflow. Recorded healthy runs swing
# by up to four from batch to batch, policy gradients by six.
NEAR_BITS = 6.0
# A scale that lifts few gradients into the float16 range.
NO_SCALE = 2.0**8
# A fall of the scale by this many bits without effect rules it out as the cause.
FAR_BITS = 8.0


def _finding(
    code: str,
    context: Context,
    since: int,
    what: str,
    cost: str,
    seen: Mapping[str, Any],
    *,
    hopeless: bool = False,
) -> Finding:
    seen = {"since": since, "at_rate": "", **seen}
    cause = cause_of(code, seen)
    return Finding(
        code=code,
        cause=cause.name,
        where=cause.where(seen),
        step=context.history.step,
        since=since,
        what=_because(what, cause, seen),
        cost=cost,
        evidence=seen,
        advice=advice_of(cause, seen, context.framework),
        more=f"gradscale explain {code}",
        hopeless=hopeless or BY_CODE[code].hopeless,
    )


def _because(what: str, cause: Cause, seen: Mapping[str, Any]) -> str:
    if not cause.because:
        return what
    return f"{what}, because {cause.because.format_map(seen)}"


def _of_episode(context: Context, episode: Episode) -> dict[str, Any]:
    """Return the evidence on an episode, up to this step."""
    seen: dict[str, Any] = {
        "steps": episode.lost,
        "of": episode.steps,
        "applied": episode.applied,
        "batches": episode.lost - episode.applied,
        "finite_before": context.history.taken > 0,
        "scale_from": power(episode.scale_from),
        "scale": power(episode.scale),
        "bits": max(0.0, round(episode.bits, 2)),
    }
    if episode.losses:
        seen["loss"] = episode.loss_kind or "not finite"
    else:
        seen["nan"] = episode.nan > 0
        seen["headroom_bits"] = _rounded(episode.headroom)
        seen["scale_blamed"] = scale_is_blamed(episode)
    seen |= _tensors(context, episode)
    seen |= _growth_before(context, episode.since)
    seen |= context.observations.of_episode(episode)
    return {name: value for name, value in seen.items() if value is not None}


def _tensors(context: Context, episode: Episode) -> dict[str, Any]:
    """Return the evidence on the tensors that were not finite at the last skip."""
    seen: dict[str, Any] = {}
    # A non-finite loss makes all gradients non-finite: the first is no evidence.
    if episode.culprit and not episode.losses:
        seen = {"culprit": episode.culprit, "culprits": episode.culprits}
        if context.tensors:
            seen["tensors"] = context.tensors
    return seen


def _last_tensors(context: Context, episode: Episode | None) -> dict[str, Any]:
    """Return the evidence on the tensors of this episode, or of the last one."""
    last = context.last_episode if episode is None else episode
    return {} if last is None else _tensors(context, last)


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
        usual = context.trend.since
        seen["usual_before"] = min(since, usual) if usual else since
    return seen


def _in_steps(number: int, steps: int) -> str:
    if number == steps:
        return "1 step" if number == 1 else f"{number} steps in a row"
    return f"in {number} of {steps} steps"


def _kind_of(episode: Episode) -> str:
    """Return the adjective for the non-finite loss or gradients of an episode."""
    if episode.losses:
        names = {"nan": "NaN", "inf": "infinite"}
        return names.get(episode.loss_kind, "not finite")
    if episode.nan == episode.gradient_row:
        return "NaN"
    return "NaN or infinite" if episode.nan else "infinite"


def _rounded(bits: float | None) -> float | None:
    return None if bits is None else round(bits, 2)
