"""One fold over the records of a run, the same live and on a file."""

from collections.abc import Sequence
from typing import NamedTuple

from gradscale.core.records import StepRecord, Verdict, classify
from gradscale.judge import build as grounds
from gradscale.judge.facts import Facts
from gradscale.judge.findings import Finding
from gradscale.judge.genuine import is_genuine
from gradscale.judge.history import MANY_LOSSES, SETTLED_AFTER, Course
from gradscale.judge.said import Said
from gradscale.judge.trend import Slope

# Steps in a row after which a fixed scale or a missing gradient is no chance.
HOPELESS_AFTER = 10
# Skips among so many steps that are worth a word, and that are not any more.
WINDOW = 100
CROWDED = 20
CALM = 5
# Finite steps in a row, or samples, that are too small to be chance.
VANISHED_STEPS = 100
VANISHED_SAMPLES = 2

_SKIPS = (Verdict.CALIBRATING, Verdict.PROBING, Verdict.OVERFLOW)
# Skips whose cause is known: the backoff after them is no sign of a fall.
_BLAMED = (
    Verdict.WEIGHTS_NONFINITE,
    Verdict.FORWARD_NONFINITE,
    Verdict.LOSS_OVERFLOW,
    Verdict.NORM_OVERFLOW,
)


class Judgement(NamedTuple):
    """What one step means in the light of those before it.

    Attributes:
        verdict: The verdict on the step.
        findings: What there is to say now; nearly always nothing.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]


class Judge:
    """Judge the steps of a run, and say once what is worth saying.

    Deterministic, and its state does not grow: fed the same records, it says the same.

    >>> judge = Judge()
    >>> for step in range(1, 101):
    ...     scale = 2.0 ** max(15, 25 - step)
    ...     fits = scale <= 2.0**15
    ...     record = StepRecord(step, scale, fits, fits, calibrated=step > 10)
    ...     for finding in judge.see(record).findings:
    ...         print(finding.text())
    GS001 calibrated: S 2^24 -> 2^15 after 9 skips (normal)

    Args:
        tensors: How many gradient tensors the run has; 0 if unknown.

    Attributes:
        tensors: As given; may be set once it is known.
    """

    def __init__(self, *, tensors: int = 0) -> None:
        self.tensors = tensors
        self._course = Course()
        self._slope = Slope()
        self._said = Said()

    @property
    def settled(self) -> bool:
        """Whether the scale has found its place, so that the start is over."""
        return self._course.settled

    @property
    def well_at(self) -> int:
        """The last step that ended ten finite ones in a row; 0 if none did.

        What was called hopeless before it has mended itself.
        """
        return self._course.well_at

    def see(self, record: StepRecord, culprits: Sequence[str] = ()) -> Judgement:
        """Judge the next step.

        Args:
            record: The step's facts. Steps come in order.
            culprits: The names of the tensors that were not finite.
        """
        losses, settled = self._course.loss.length, self._course.settled
        self._course.note(record, culprits)
        verdict = self._verdict(record)
        found: list[Finding] = []
        if verdict is Verdict.NO_GRADIENTS:
            self._idle(record, found)
            return Judgement(verdict, tuple(found))
        if losses:
            self._after_loss(record, losses, found)
        if self._course.finite.length:
            self._well(record, settled, found)
        else:
            self._trouble(record, verdict, found)
            self._count(record, verdict, found)
        self._crowd(record, verdict, found)
        if self._course.settled:
            self._early(record, verdict, found)
        return Judgement(verdict, tuple(found))

    def end(self) -> tuple[Finding, ...]:
        """Return what is still unsaid if the run ends here. Changes nothing."""
        run = self._course.loss
        if self._said.told or self._said.losses_now or not run.length:
            return ()
        # The record of the last step is gone: what it said is in the run.
        record = StepRecord(self._course.step, run.last, False, False, False)
        facts, times = self._facts(record), self._said.losses + 1
        return (grounds.loss(facts, run.length, times, over=False, hopeless=False),)

    def _verdict(self, record: StepRecord) -> Verdict:
        """Refine the verdict on a step alone by what came before it."""
        verdict = classify(record)
        if verdict in _SKIPS:
            if is_genuine(self._course):
                return Verdict.GENUINE
            return verdict if self._course.settled else Verdict.CALIBRATING
        if verdict is Verdict.OK and self._course.tiny.length >= VANISHED_STEPS:
            return Verdict.UNDERFLOW
        return verdict

    def _facts(self, record: StepRecord) -> Facts:
        return Facts(record, self._course, self._slope, self.tensors)

    def _idle(self, record: StepRecord, found: list[Finding]) -> None:
        if self._course.none.length == HOPELESS_AFTER:
            found.append(grounds.idle(self._facts(record)))

    def _after_loss(self, record: StepRecord, steps: int, found: list[Finding]) -> None:
        """Say of a few losses that were not finite that they are over."""
        said = self._said
        if self._course.loss.length:
            return
        if not (said.losses_now or said.told):
            self._lose(record, steps, found, over=True)
        said.losses_now = False

    def _lose(
        self, record: StepRecord, steps: int, found: list[Finding], *, over: bool
    ) -> None:
        """Say that losses were not finite, at the 1st, 2nd, 4th, 8th, ... time."""
        times = self._times()
        if _is_power_of_two(times):
            facts = self._facts(record)
            lost = grounds.loss(facts, steps, times, over=over, hopeless=False)
            found.append(lost)

    def _times(self) -> int:
        """Return which time this is that losses are not finite, and count it once."""
        said = self._said
        said.losses += not said.losses_now
        said.losses_now = True
        return said.losses

    def _well(
        self, record: StepRecord, was_settled: bool, found: list[Finding]
    ) -> None:
        course, said = self._course, self._said
        if course.finite.length >= SETTLED_AFTER:
            said.told = ""
            said.scaled_now = said.norms_now = False
            moved = record.scale != course.first_scale
            if course.early_skips and moved and not was_settled:
                found.append(grounds.calibrated(self._facts(record)))
        enough = course.lost.length >= VANISHED_SAMPLES
        if enough or course.tiny.length >= VANISHED_STEPS:
            if not said.vanished:
                found.append(grounds.underflow(self._facts(record)))
            said.vanished = True
        elif not (course.lost.length or course.tiny.length):
            said.vanished = False

    def _trouble(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> None:
        """Say that the run cannot go on like this; once, until it is well again."""
        if self._said.told:
            return
        facts, run, loss = self._facts(record), self._course.bad, self._course.loss
        if not record.weights_finite:
            found.append(grounds.weights(facts))
        elif verdict is Verdict.COLLAPSE:
            found.append(grounds.collapse(facts))
        elif loss.skips >= MANY_LOSSES:
            losses = loss.length, self._times()
            found.append(grounds.loss(facts, *losses, over=False, hopeless=True))
        elif verdict is Verdict.GENUINE:
            found.append(grounds.genuine(facts))
        elif run.length >= HOPELESS_AFTER and run.held == run.length - 1:
            found.append(grounds.fixed(facts, run.length, run.length, run.since))
        else:
            self._useless(record, found)
            return
        self._said.told = found[-1].code

    def _useless(self, record: StepRecord, found: list[Finding]) -> None:
        """Say that the loss is not finite though steps are taken."""
        steps = self._course.loss.length
        if steps >= MANY_LOSSES and not self._said.losses_now:
            self._lose(record, steps, found, over=False)

    def _count(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> None:
        """Say what comes back time and again, at the 1st, 2nd, 4th, 8th, ... time."""
        said = self._said
        if verdict is Verdict.LOSS_OVERFLOW and not said.scaled_now:
            said.scaled_now = True
            said.scaled += 1
            if _is_power_of_two(said.scaled):
                found.append(grounds.scaled_loss(self._facts(record), said.scaled))
        if verdict is Verdict.NORM_OVERFLOW and not said.norms_now:
            said.norms_now = True
            said.norms += 1
            if _is_power_of_two(said.norms):
                found.append(grounds.norm(self._facts(record), said.norms))

    def _crowd(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> None:
        """Say that too many of the last hundred steps were skipped."""
        said = self._said
        if said.window == 0:
            said.window_since = record.step
        said.window += 1
        if verdict is Verdict.OVERFLOW:
            said.window_skips += 1
            said.window_held += record.scale == said.skip_scale
            said.skip_scale = record.scale
            full = said.window_skips >= CROWDED
            if full and not (said.crowded or said.told):
                said.crowded = True
                held = said.window_held >= CROWDED - 1
                say = grounds.fixed if held else grounds.crowded
                counts = said.window_skips, said.window, said.window_since
                found.append(say(self._facts(record), *counts))
        if said.window >= WINDOW:
            said.crowded = said.crowded and said.window_skips > CALM
            said.window = said.window_skips = said.window_held = 0

    def _early(
        self, record: StepRecord, verdict: Verdict, found: list[Finding]
    ) -> None:
        told = bool(self._said.told)
        alarm = self._slope.see(record, blamed=told or verdict in _BLAMED)
        if alarm and not told:
            found.append(grounds.falling(self._facts(record), alarm))


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
