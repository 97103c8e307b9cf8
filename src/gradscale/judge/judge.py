"""Judges the steps of a run in order; used live and on run files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradscale.core.records import StepRecord, Verdict, classify
from gradscale.judge import build
from gradscale.judge.build import Context
from gradscale.judge.findings import Finding
from gradscale.judge.history import MANY_LOSSES, SETTLED_AFTER, History
from gradscale.judge.trend import Trend, exponent
from gradscale.judge.verdict_table import Skip, verdicts_where

# Steps in a row at a fixed scale, or without a gradient, before a finding.
HOPELESS_AFTER = 10
# Skips in a window of steps that make a finding, and that end it.
WINDOW = 100
TOO_MANY_SKIPS = 20
FEW_SKIPS = 5
# Finite steps in a row, or samples, with vanishing gradients before a finding.
VANISHED_STEPS = 100
VANISHED_SAMPLES = 2
# Gradients that stay non-finite over this many bits of scale are so at any scale:
# with NaN, or with infinity only. Recorded runs drop by up to 8 bits from one batch to
# the next, never for as many steps in a row.
GENUINE_STEPS = 8
GENUINE_BITS_NAN = 8.0
GENUINE_BITS_INF = 10.0
# Before the first finite step, NaN may come from infinity minus infinity: the scale
# must also have fallen far below 1, where losses of raw data may still fit.
GENUINE_SCALE = 2.0**-8

_SCALE_SKIPS = verdicts_where(lambda row: row.skip is Skip.SCALE)
# The backoff after these skips is no sign of a falling scale.
_BLAMED = verdicts_where(lambda row: row.skip is Skip.CAUSE)


class Judgement(NamedTuple):
    """The judgement on one step, given the steps before it.

    Attributes:
        verdict: The verdict on the step.
        findings: New findings; empty for nearly every step.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class Reported:
    """Findings that were already reported, and counters towards the next ones.

    Attributes:
        trouble: The code of the hopeless finding in force; empty if there is none.
        losses: Episodes of non-finite losses so far.
        in_losses: The present episode is counted.
        scaled: Episodes in which the scaled loss overflowed.
        in_scaled: The present episode is counted.
        norms: Episodes in which the norm overflowed.
        in_norms: The present episode is counted.
        frequent_skips: Too many skips were reported.
        vanished: Vanishing gradients were reported.
        window: Steps in the present window.
        window_since: The first of them.
        window_skips: Skips among them.
        window_held: Those at the scale of the skip before.
        skip_scale: The scale of the last skip.
    """

    trouble: str = ""
    losses: int = 0
    in_losses: bool = False
    scaled: int = 0
    in_scaled: bool = False
    norms: int = 0
    in_norms: bool = False
    frequent_skips: bool = False
    vanished: bool = False
    window: int = 0
    window_since: int = 0
    window_skips: int = 0
    window_held: int = 0
    skip_scale: float = 0.0


class Judge:
    """Judges the steps of a run and reports each finding once.

    Deterministic, with a state of fixed size: the same records give the same findings.

    >>> judge = Judge()
    >>> for step in range(1, 101):
    ...     scale = 2.0 ** max(15, 25 - step)
    ...     fits = scale <= 2.0**15
    ...     record = StepRecord(step, scale, fits, fits, calibrated=step > 10)
    ...     for finding in judge.see(record).findings:
    ...         print(finding.text())
    GS001 calibrated: S 2^24 -> 2^15 after 9 skips (normal)

    Args:
        tensors: The number of gradient tensors of the run; 0 if unknown.

    Attributes:
        tensors: As given; may be set once it is known.
    """

    def __init__(self, *, tensors: int = 0) -> None:
        self.tensors = tensors
        self._history = History()
        self._trend = Trend()
        self._reported = Reported()

    @property
    def settled(self) -> bool:
        """True once the calibration at the start of the run is over."""
        return self._history.settled

    @property
    def healthy_at(self) -> int:
        """The last step that ended ten finite ones in a row; 0 if there is none.

        Hopeless findings before it no longer apply: see `clear_recovered`.
        """
        return self._history.healthy_at

    def see(self, record: StepRecord, culprits: Sequence[str] = ()) -> Judgement:
        """Judge the next step.

        Args:
            record: The record of the step. Steps come in order.
            culprits: The names of the tensors that were not finite.
        """
        history = self._history
        losses, was_settled = history.loss.length, history.settled
        history.add(record, culprits)
        verdict = classify(record)
        if verdict in _SCALE_SKIPS:
            verdict = self._verdict_of_overflow(verdict)
        elif verdict is Verdict.OK and history.tiny.length >= VANISHED_STEPS:
            verdict = Verdict.UNDERFLOW
        found: list[Finding] = []
        if verdict is Verdict.NO_GRADIENTS:
            self._check_no_gradients(record, found)
            return Judgement(verdict, tuple(found))
        if losses:
            self._check_recovered_loss(record, losses, found)
        if history.finite:
            self._check_finite_step(record, was_settled, found)
        else:
            self._check_hopeless(record, verdict, found)
            self._check_repeated(record, verdict, found)
        self._check_skip_rate(record, verdict, found)
        if history.settled:
            reported = self._reported
            blamed = bool(reported.trouble) or verdict in _BLAMED
            alarm = self._trend.add(record, blamed=blamed)
            if alarm and not reported.trouble:
                found.append(build.falling_scale(self._context(record), alarm))
        return Judgement(verdict, tuple(found))

    def end(self) -> tuple[Finding, ...]:
        """Return the findings still open if the run ends here. Changes nothing."""
        run, reported = self._history.loss, self._reported
        if reported.trouble or reported.in_losses or not run.length:
            return ()
        # The record of the last step is not kept; the streak has its scale.
        record = StepRecord(self._history.step, run.last, False, False, False)
        context, times = self._context(record), reported.losses + 1
        found = build.nonfinite_loss(
            context, run.length, times, over=False, hopeless=False
        )
        return (found,)

    def _verdict_of_overflow(self, verdict: Verdict) -> Verdict:
        """Refine the verdict on an overflow by the steps before it."""
        if is_genuine(self._history):
            return Verdict.GENUINE
        known = self._history.settled or self._history.fits
        return verdict if known else Verdict.CALIBRATING

    def _context(self, record: StepRecord) -> Context:
        return Context(record, self._history, self._trend, self.tensors)

    def _check_no_gradients(self, record: StepRecord, found: list[Finding]) -> None:
        if self._history.none.length == HOPELESS_AFTER:
            found.append(build.no_gradients(self._context(record)))

    def _check_recovered_loss(
        self, record: StepRecord, steps: int, found: list[Finding]
    ) -> None:
        """Report non-finite losses once the loss is finite again."""
        reported = self._reported
        if self._history.loss.length:
            return
        if not (reported.in_losses or reported.trouble):
            self._report_loss(record, steps, found, over=True)
        reported.in_losses = False

    def _report_loss(
        self, record: StepRecord, steps: int, found: list[Finding], *, over: bool
    ) -> None:
        """Report non-finite losses, in the 1st, 2nd, 4th, 8th, ... episode."""
        times = self._count_losses()
        if _is_power_of_two(times):
            context = self._context(record)
            found.append(
                build.nonfinite_loss(context, steps, times, over=over, hopeless=False)
            )

    def _count_losses(self) -> int:
        """Return the number of the present episode, and count it once."""
        reported = self._reported
        reported.losses += not reported.in_losses
        reported.in_losses = True
        return reported.losses

    def _check_finite_step(
        self, record: StepRecord, was_settled: bool, found: list[Finding]
    ) -> None:
        history, reported = self._history, self._reported
        if history.finite >= SETTLED_AFTER:
            reported.trouble = ""
            reported.in_scaled = reported.in_norms = False
            moved = record.scale != history.first_scale
            if history.early_skips and moved and not was_settled:
                found.append(build.calibrated(self._context(record)))
        enough = history.lost.length >= VANISHED_SAMPLES
        if enough or history.tiny.length >= VANISHED_STEPS:
            if not reported.vanished:
                found.append(build.underflow(self._context(record)))
            reported.vanished = True
        elif not (history.lost.length or history.tiny.length):
            reported.vanished = False

    def _check_hopeless(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> None:
        """Report a run that cannot recover; once, until it is healthy again."""
        if self._reported.trouble:
            return
        context, history = self._context(record), self._history
        run, loss = history.bad, history.loss
        if not record.weights_finite:
            found.append(build.nonfinite_weights(context))
        elif verdict is Verdict.COLLAPSE:
            found.append(build.collapse(context))
        elif loss.skips >= MANY_LOSSES:
            losses = loss.length, self._count_losses()
            lost = build.nonfinite_loss(context, *losses, over=False, hopeless=True)
            found.append(lost)
        elif verdict is Verdict.GENUINE:
            found.append(build.genuine(context))
        elif run.length >= HOPELESS_AFTER and run.held == run.length - 1:
            counts = run.length, run.length, run.since
            found.append(build.fixed_scale(context, *counts))
        else:
            self._check_useless_loss(record, found)
            return
        self._reported.trouble = found[-1].code

    def _check_useless_loss(self, record: StepRecord, found: list[Finding]) -> None:
        """Report a loss that is not finite although steps are applied."""
        steps = self._history.loss.length
        if steps >= MANY_LOSSES and not self._reported.in_losses:
            self._report_loss(record, steps, found, over=False)

    def _check_repeated(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> None:
        """Report overflowing losses and norms, in the 1st, 2nd, 4th, ... episode."""
        reported = self._reported
        if verdict is Verdict.LOSS_OVERFLOW and not reported.in_scaled:
            reported.in_scaled = True
            reported.scaled += 1
            if _is_power_of_two(reported.scaled):
                context = self._context(record)
                found.append(build.loss_overflow(context, reported.scaled))
        if verdict is Verdict.NORM_OVERFLOW and not reported.in_norms:
            reported.in_norms = True
            reported.norms += 1
            if _is_power_of_two(reported.norms):
                found.append(build.norm_overflow(self._context(record), reported.norms))

    def _check_skip_rate(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> None:
        """Report too many skips among the last hundred steps."""
        reported = self._reported
        if reported.window == 0:
            reported.window_since = record.step
        reported.window += 1
        if verdict is Verdict.OVERFLOW:
            reported.window_skips += 1
            reported.window_held += record.scale == reported.skip_scale
            reported.skip_scale = record.scale
            full = reported.window_skips >= TOO_MANY_SKIPS
            if full and not (reported.frequent_skips or reported.trouble):
                reported.frequent_skips = True
                held = reported.window_held >= TOO_MANY_SKIPS - 1
                finding = build.fixed_scale if held else build.frequent_skips
                since = reported.window_since
                counts = reported.window_skips, reported.window, since
                found.append(finding(self._context(record), *counts))
        if reported.window >= WINDOW:
            many = reported.window_skips > FEW_SKIPS
            reported.frequent_skips = reported.frequent_skips and many
            reported.window = reported.window_skips = reported.window_held = 0


def is_genuine(history: History) -> bool:
    """Return whether the last bad steps would be non-finite at any scale. Pure."""
    run = history.bad
    if run.length < GENUINE_STEPS:
        return False
    bits = exponent(run.origin) - exponent(run.last)
    if history.settled:
        all_nan = run.nan == run.length
        return bits >= (GENUINE_BITS_NAN if all_nan else GENUINE_BITS_INF)
    # NaN has turned into infinity: a lower scale does make a difference.
    better = run.nan > 0 and 0 < run.after_nan < GENUINE_STEPS
    low = run.last <= GENUINE_SCALE
    return low and bits >= GENUINE_BITS_NAN and not better


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
