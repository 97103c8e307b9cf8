"""Judges the steps of a run in order; used live and on run files."""

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from operator import itemgetter
from typing import Any, NamedTuple

from gradscale.core.records import StepRecord, Verdict, classify
from gradscale.judge import finding_builders as build
from gradscale.judge.finding_builders import Context, Window, scale_is_blamed
from gradscale.judge.findings import Finding, lost_batches
from gradscale.judge.history import (
    ENDED_AFTER,
    FIRST_STEPS,
    FRESH_STEPS,
    SETTLED_AFTER,
    SUSPECT_LAYER,
    VANISHED_LAYER,
    Episode,
    History,
    Scattered,
)
from gradscale.judge.observations import Observations
from gradscale.judge.trend import Alarm, Trend, exponent
from gradscale.judge.verdict_table import Skip, verdicts_where

# Lost steps in a row before an episode is hopeless, and before it is always reported.
# Live, records of PyTorch are two to six steps old: a hopeless run is stopped within
# sixteen. The module hooks have observed a location by then.
HOPELESS_AFTER = 10
# The same for an episode whose location is known.
LOCATED_AFTER = 8
# Non-finite losses that make a mixed episode hopeless.
SOME_LOSSES = 3
# Skips in a window of steps that make a finding, and that end it.
WINDOW = 100
TOO_MANY_SKIPS = 20
FEW_SKIPS = 5
# Finite steps in a row, or samples, with vanishing gradients before a finding.
VANISHED_STEPS = 100
VANISHED_SAMPLES = 3
# Number of bits of scale over which gradients must stay non-finite to be genuinely so:
# with NaN, or with infinity only. Recorded runs drop by up to 8 bits from one batch to
# the next, never for as many steps in a row.
GENUINE_STEPS = 8
GENUINE_BITS_NAN = 8.0
GENUINE_BITS_INF = 10.0
# Before the first finite step, NaN may come from infinity minus infinity: the scale
# must also have fallen far below 1, where losses of raw data may still fit.
GENUINE_SCALE = 2.0**-8
# Short episodes with headroom that rule out the scale: with NaN, or with infinity.
HEADROOM_EPISODES_NAN = 3
HEADROOM_EPISODES_INF = 5
# Equal gaps in a row, after the first, between steps with NaN at falling scales: the
# same batch of every epoch. Infinity alone comes at regular intervals too.
REGULAR = 2
# Bits of headroom from which on a NaN may have a cause other than the scale.
DOUBT_BITS = 2.0
# Skips of a calibration that is too long: 2^16 becomes 2^-34 in as many halvings.
LONG_CALIBRATION = 50
# The end of a calibration is reported if log2 of the scale is at most this, and bits of
# gradients above the loss at least this. Large losses have large gradients.
LOW_SCALE = -4.0
AMPLIFIED_BITS = 18.0
# Bits by which gradients must have grown since the beginning of the run, and by which
# the scale must have fallen below one that fitted, for an alarm.
GROWN_BITS = 6.0

_LOST = verdicts_where(lambda row: row.skipped)
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


class Judge:
    """Judges the steps of a run and reports each finding once.

    Deterministic, with a state of bounded size: the same records and observations give
    the same findings.

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
        framework: The framework whose calls the advice names: "torch", "jax", "keras";
            empty for none.

    Attributes:
        tensors: The same number; may be set once it is known.
    """

    def __init__(self, *, tensors: int = 0, framework: str = "") -> None:
        self.tensors = tensors
        self._framework = framework
        self._history = History()
        self._trend = Trend()
        self._observations = Observations()
        self._early: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._episode: Episode | None = None
        self._last_episode: Episode | None = None
        # Codes of misuse, and of vanishing gradients, that were reported.
        self._reported: set[str] = set()
        self._bad_losses = Scattered()
        self._with_headroom = Scattered()
        self._regular = Scattered()
        self._overflows = {"GS204": 0, "GS206": 0}
        self._window = Window()
        self._frequent = False

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

    @property
    def episode(self) -> Episode | None:
        """The present episode of lost steps; None if the last steps were finite."""
        return self._episode

    @property
    def excludes_scale(self) -> bool:
        """True if the last step was lost and the scale may not be the cause."""
        episode = self._episode
        if episode is None or not episode.lost_in_row:
            return False
        # A NaN after finite steps at the same scale, with headroom.
        room = episode.headroom is not None and episode.headroom >= DOUBT_BITS
        doubted = episode.nan > 0 and room and not (episode.raised or episode.new_scale)
        return episode.loss_row > 0 or doubted or not scale_is_blamed(episode)

    @property
    def suspected_layer(self) -> str:
        """A layer that may have lost its gradients to underflow; empty if none."""
        history = self._history
        return history.layer if history.layer_samples >= SUSPECT_LAYER else ""

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Judgements not possible so far, with reasons; one sentence each."""
        return self._observations.not_judged

    def observe(self, step: int, data: Mapping[str, Any]) -> None:
        """Add an observation, which is valid from its step on.

        Args:
            step: In any order: evidence on a judged step arrives after observations
                of later ones.
            data: See `gradscale.judge.observations`.
        """
        if self._early and step < self._early[-1][0]:
            insort(self._early, (step, data), key=itemgetter(0))
        else:
            self._early.append((step, data))

    def see(self, record: StepRecord, culprits: Sequence[str] = ()) -> Judgement:
        """Judge the next step.

        Args:
            record: The record of the step. Steps come in order.
            culprits: The names of the tensors that were not finite.
        """
        found: list[Finding] = []
        observed = bool(self._early) and self._take_observations(record.step)
        verdict = classify(record)
        if verdict is Verdict.NO_GRADIENTS:
            self._history.add_idle(record.step)
            if self._history.no_gradients.length == HOPELESS_AFTER:
                found.append(build.no_gradients(self._context(record)))
        elif verdict in _LOST:
            verdict = self._see_lost(record, verdict, culprits, found)
        else:
            verdict = self._see_finite(record, verdict, found)
        if observed:
            self._check_misuse(self._context(record), found)
        return Judgement(verdict, tuple(found))

    def _see_lost(
        self,
        record: StepRecord,
        verdict: Verdict,
        culprits: Sequence[str],
        found: list[Finding],
    ) -> Verdict:
        """Judge a lost step; return its verdict, refined by the steps before it."""
        history = self._history
        headroom = history.headroom(record.scale)
        if self._episode is None:
            good = history.good_scale or record.scale
            new = history.at_scale < FRESH_STEPS or record.scale != good
            raised = record.grown or record.scale > good or (new and history.raised)
            few = history.at_scale < ENDED_AFTER
            new_scale = new or (few and not history.settled)
            self._episode = Episode(record.step, good, headroom, raised, new_scale)
        episode = self._episode
        history.add(record, lost=True)
        episode.add_lost(record, culprits, headroom)
        if self._observations.excludes_scale(episode):
            episode.scale_excluded = True
        if verdict in _SCALE_SKIPS:
            if is_genuine(episode, settled=history.settled):
                verdict = Verdict.GENUINE
            elif not (history.settled or history.fits):
                verdict = Verdict.CALIBRATING
        self._check_lost(self._context(record), verdict, episode, found)
        if verdict in (Verdict.OVERFLOW, Verdict.PROBING):
            self._check_skip_rate(record, episode, found)
        if history.settled:
            blamed = verdict in _BLAMED or _is_explained(episode)
            blamed = blamed or (
                verdict in _SCALE_SKIPS and not scale_is_blamed(episode)
            )
            self._check_trend(record, blamed, found)
        return verdict

    def _see_finite(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> Verdict:
        """Judge a finite step; return its verdict, refined by the steps before it."""
        history, was_settled = self._history, self._history.settled
        history.add(record, lost=False)
        if self._episode is not None and self._episode.add_finite():
            self._end_episode(self._context(record), self._episode, found)
            self._last_episode, self._episode = self._episode, None
        if not was_settled and history.finite >= SETTLED_AFTER:
            moved = record.scale != history.first_scale
            if history.early_skips and moved:
                low = history.good_log2 <= LOW_SCALE
                large = low and history.amplification() >= AMPLIFIED_BITS
                make = build.amplified if large else build.calibrated
                found.append(make(self._context(record)))
        if history.lost.length or history.tiny.length or history.layer:
            if history.tiny.length >= VANISHED_STEPS:
                verdict = Verdict.UNDERFLOW
            self._check_vanished(record, found)
        else:
            self._reported.discard("GS209")
        if history.settled:
            episode = self._episode
            blamed = episode is not None and _is_explained(episode)
            self._check_trend(record, blamed, found)
        return verdict

    def end(self) -> tuple[Finding, ...]:
        """Return the findings still open if the run ends here. Changes nothing."""
        observations = deepcopy(self._observations)
        for each in self._early:
            observations.add(*each)
        # The record of the last step is not kept.
        record = StepRecord(self._history.step, self._history.good_scale, True, True)
        context = self._context(record)._replace(observations=observations)
        found = [
            build.misuse(context, code)
            for code in observations.misused(ended=True)
            if code not in self._reported
        ]
        episode = self._episode
        if episode is not None and episode.losses and not episode.reported:
            found.append(
                build.nonfinite_loss(context, episode, recovered=None, hopeless=False)
            )
        return tuple(found)

    def _take_observations(self, step: int) -> bool:
        """Count the observations up to a step; return whether there are any."""
        taken = False
        while self._early and self._early[0][0] <= step:
            self._observations.add(*self._early.popleft())
            taken = True
        return taken

    def _context(self, record: StepRecord) -> Context:
        return Context(
            record,
            self._history,
            self._trend,
            self._observations,
            self.tensors,
            self._last_episode,
            self._framework,
        )

    def _check_lost(
        self,
        context: Context,
        verdict: Verdict,
        episode: Episode,
        found: list[Finding],
    ) -> None:
        """Report an episode, once, when its kind is known."""
        if verdict in (Verdict.LOSS_OVERFLOW, Verdict.NORM_OVERFLOW):
            self._check_overflow(context, verdict.code, episode, found)
        if episode.hopeless:
            return
        finding: Finding | None = None
        enough = LOCATED_AFTER if self._located(episode) else HOPELESS_AFTER
        mixed = episode.lost_in_row >= enough and episode.losses >= SOME_LOSSES
        if not context.record.weights_finite:
            finding = build.nonfinite_weights(context, episode)
        elif verdict is Verdict.COLLAPSE:
            finding = build.collapse(context, episode)
        elif episode.loss_row >= enough or (mixed and not episode.applied):
            finding = build.nonfinite_loss(
                context, episode, recovered=None, hopeless=True
            )
        elif verdict is Verdict.GENUINE:
            finding = build.genuine(context, episode)
        elif context.history.early_skips == LONG_CALIBRATION and not (
            # New scalers calibrate again and again.
            episode.reported or "GS118" in self._reported
        ):
            skips = Window(episode.since, steps=episode.steps, skips=episode.lost)
            finding = build.frequent_skips(context, episode, skips, fixed=False)
        elif (
            # Without a finite step between lost ones, GS208 decides.
            episode.taken
            and episode.headroom_skips >= GENUINE_STEPS
            and episode.bits_lost_with_headroom >= GENUINE_BITS_NAN
            and "GS211" not in episode.reported
        ):
            finding = build.with_headroom(context, episode, Scattered.of(episode))
        elif self._is_fixed(episode):
            row = episode.gradient_row
            window = Window(episode.since, steps=row, skips=row)
            if "GS205" not in episode.reported:
                finding = build.frequent_skips(context, episode, window, fixed=True)
        elif (
            min(episode.applied, episode.losses) >= LOCATED_AFTER
            and not episode.reported
        ):
            finding = build.nonfinite_loss(
                context, episode, recovered=None, hopeless=False
            )
        if finding is not None:
            self._report(finding, found)

    def _is_fixed(self, episode: Episode) -> bool:
        """Return whether the scale stays although no step was applied."""
        row = episode.gradient_row
        return row >= HOPELESS_AFTER and episode.same_scale == row - 1

    def _located(self, episode: Episode) -> bool:
        return "place" in self._observations.of_episode(episode)

    def _report(self, finding: Finding, found: list[Finding]) -> None:
        found.append(finding)
        if self._episode is not None:
            self._episode.reported += (finding.code,)
            self._episode.hopeless = self._episode.hopeless or finding.hopeless

    def _check_overflow(
        self, context: Context, code: str, episode: Episode, found: list[Finding]
    ) -> None:
        """Report overflowing losses and norms, in the 1st, 2nd, 4th, ... episode."""
        if code in episode.reported:
            return
        self._overflows[code] += 1
        times = self._overflows[code]
        make = build.loss_overflow if code == "GS206" else build.norm_overflow
        if _is_power_of_two(times):
            self._report(make(context, episode, times), found)
        else:
            episode.reported += (code,)

    def _check_vanished(self, record: StepRecord, found: list[Finding]) -> None:
        """Report vanishing gradients, once until they recover."""
        history = self._history
        flushed = self._observations.is_flushed(history.layer, record.amax)
        has_room = history.has_room(record.scale)
        samples = SUSPECT_LAYER if has_room else VANISHED_LAYER
        vanished = (
            history.lost.length >= VANISHED_SAMPLES
            or history.tiny.length >= VANISHED_STEPS
            or (flushed is True and history.layer_samples >= samples)
            or (flushed is None and history.layer_sinking >= VANISHED_LAYER)
            or build.is_nothing_left(history, record)
        )
        known = "GS209" in self._reported or not self._observations.uses_float16
        if vanished and not known:
            self._reported.add("GS209")
            found.append(build.underflow(self._context(record)))

    def _end_episode(
        self, context: Context, episode: Episode, found: list[Finding]
    ) -> None:
        """Report an episode that the run has recovered from, if it was not normal."""
        if episode.reported:
            return
        if episode.losses:
            self._bad_losses.add(episode)
            located = self._located(episode) and "place" not in self._reported
            if located or _is_power_of_two(self._bad_losses.times):
                self._reported |= {"place"} if located else set()
                found.append(
                    build.nonfinite_loss(
                        context, episode, recovered=self._bad_losses, hopeless=False
                    )
                )
        elif episode.gradients and scale_is_blamed(episode):
            seen = self._regular
            # A scale that grows overflows at regular intervals too.
            if not episode.raised:
                seen.add(episode)
            falling, nan = seen.highest > seen.lowest, seen.nan == seen.times
            if seen.equal_gaps == REGULAR and seen.every and falling and nan:
                found.append(build.with_headroom(context, episode, seen))
        elif episode.gradients:
            seen = self._with_headroom
            seen.add(episode)
            enough = (
                HEADROOM_EPISODES_NAN
                if seen.nan == seen.times
                else HEADROOM_EPISODES_INF
            )
            at_scales = seen.highest > seen.lowest
            whole, rest = divmod(seen.times, enough)
            often = at_scales and not rest and _is_power_of_two(whole)
            located = episode.scale_excluded and "scale_excluded" not in self._reported
            if often or located:
                self._reported |= {"scale_excluded"} if located else set()
                found.append(build.with_headroom(context, episode, seen))

    def _check_skip_rate(
        self, record: StepRecord, episode: Episode, found: list[Finding]
    ) -> None:
        """Report too many skips within a hundred steps."""
        window, steps = self._window, self._history.steps
        if not (window.skips and steps - window.before <= WINDOW):
            lasts = window.skips > FEW_SKIPS and steps - window.before <= 2 * WINDOW
            self._frequent = self._frequent and lasts
            scale = window.last_scale
            window = Window(record.step, before=steps - 1, last_scale=scale)
            self._window = window
        window.steps = steps - window.before
        window.skips += 1
        window.same_scale += record.scale == window.last_scale
        window.growths += record.grown
        window.last_scale = record.scale
        full = window.skips >= TOO_MANY_SKIPS and not self._frequent
        if full and not _is_explained(episode):
            self._frequent = True
            fixed = window.same_scale >= TOO_MANY_SKIPS - 1
            # Scalers that are created repeatedly have been reported, and skip in turn.
            known = {"GS201", "GS205"} & {*episode.reported}
            if not known and "GS118" not in self._reported:
                self._report(
                    build.frequent_skips(
                        self._context(record), episode, window, fixed=fixed
                    ),
                    found,
                )

    def _check_misuse(self, context: Context, found: list[Finding]) -> None:
        """Report each misuse of the scaler once."""
        for code in self._observations.misused():
            if code not in self._reported:
                self._reported.add(code)
                found.append(build.misuse(context, code))

    def up_to_now(self, finding: Finding) -> Finding:
        """Return a finding that counts all occurrences, with the counts so far."""
        if finding.code == "GS203" and finding.evidence.get("recovered"):
            return finding._replace(cost=lost_batches(self._bad_losses.lost))
        if finding.code not in self._observations.misused(ended=True):
            return finding
        record = StepRecord(self._history.step, self._history.good_scale, True, True)
        now = build.misuse(self._context(record), finding.code)
        return now._replace(step=finding.step, since=finding.since)

    def _check_trend(
        self, record: StepRecord, blamed: bool, found: list[Finding]
    ) -> None:
        """Report a falling scale, unless the present episode has a known cause."""
        history, episode = self._history, self._episode
        alarm = self._trend.add(record, blamed=blamed)
        grown = history.size - history.size_start >= GROWN_BITS
        if alarm is None and grown and "growth" not in self._reported:
            alarm = self._growth()
        if alarm and not (episode is not None and _is_explained(episode)):
            context = self._context(record)
            found.append(build.falling_scale(context, episode, alarm))

    def _growth(self) -> Alarm | None:
        """Return an alarm if the scale has fallen with the growth of the gradients."""
        history = self._history
        fallen = exponent(history.fitting_scale) - exponent(history.good_scale)
        if history.sizes < 2 * FIRST_STEPS or fallen < GROWN_BITS:
            return None
        self._reported.add("growth")
        first, now = history.size_start, history.size
        return Alarm("gradients", history.step, history.first_step, first, now)


def is_genuine(episode: Episode, *, settled: bool) -> bool:
    """Return whether the last lost steps would be non-finite at any scale. Pure."""
    if episode.gradient_row < GENUINE_STEPS:
        return False
    bits = episode.row_bits
    if settled:
        all_nan = episode.nan == episode.gradient_row
        return bits >= (GENUINE_BITS_NAN if all_nan else GENUINE_BITS_INF)
    # NaN has turned into infinity: a lower scale does make a difference.
    better = episode.nan > 0 and 0 < episode.after_nan < GENUINE_STEPS
    low = episode.scale <= GENUINE_SCALE
    return low and bits >= GENUINE_BITS_NAN and not better


def _is_explained(episode: Episode) -> bool:
    """Return whether a finding unrelated to the scale was reported for an episode."""
    return episode.hopeless or bool({"GS203", "GS211"} & {*episode.reported})


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
