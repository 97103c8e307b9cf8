"""One fold over the records of a run, the same live and on a file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from gradscale.core import grounds
from gradscale.core.alarms import Slope, exponent
from gradscale.core.course import SETTLED_AFTER, Course
from gradscale.core.findings import Finding
from gradscale.core.grounds import Facts
from gradscale.core.said import Said
from gradscale.core.verdicts import StepRecord, Verdict, classify

# Steps in a row after which a fixed scale or a missing gradient is no chance.
HOPELESS_AFTER = 10
# The same of a loss. Live, facts are two steps old: a run is stopped within ten.
LOSSES_HOPELESS_AFTER = 8
# Gradients that stay bad over so many bits of scale are bad at any: NaN, or only
# infinity. Recorded runs drop by up to 8 bits from one batch to the next, never for
# as many steps in a row.
GENUINE_STEPS = 8
GENUINE_BITS_NAN = 8.0
GENUINE_BITS_INF = 10.0
# Before any scale has fitted, NaN may come from infinity minus infinity: the scale
# must also have gone where it does not enlarge anything.
GENUINE_SCALE_NAN = 1.0
GENUINE_SCALE_INF = 2.0**-8
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

    Deterministic, and its state does not grow: fed the same records, from the start or
    from a saved state, it says the same.

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
        if self._said.told or not run.length:
            return ()
        # The record of the last step is gone: what it said is in the run.
        record = StepRecord(self._course.step, run.last, False, False, False)
        facts = self._facts(record)
        return (grounds.loss(facts, run.length, over=False, hopeless=False),)

    def state_dict(self) -> dict[str, Any]:
        """Return all that later judgements depend on, as plain values."""
        return {
            "tensors": self.tensors,
            "course": self._course.as_dict(),
            "slope": asdict(self._slope),
            "said": asdict(self._said),
        }

    @classmethod
    def from_state(cls, saved: Mapping[str, Any]) -> "Judge":
        """Return a judge that goes on where the saved one stood."""
        judge = cls(tensors=saved["tensors"])
        judge._course = Course.from_dict(saved["course"])
        judge._slope = Slope(**saved["slope"])
        judge._said = Said(**saved["said"])
        return judge

    def _verdict(self, record: StepRecord) -> Verdict:
        """Refine the verdict on a step alone by what came before it."""
        verdict = classify(record)
        if verdict in _SKIPS:
            if self._is_genuine():
                return Verdict.GENUINE
            return verdict if self._course.settled else Verdict.CALIBRATING
        if verdict is Verdict.OK and self._course.tiny.length >= VANISHED_STEPS:
            return Verdict.UNDERFLOW
        return verdict

    def _is_genuine(self) -> bool:
        run = self._course.bad
        if run.length < GENUINE_STEPS:
            return False
        bits = exponent(run.origin) - exponent(run.last)
        all_nan = run.nan == run.length
        if self._course.settled:
            return bits >= (GENUINE_BITS_NAN if all_nan else GENUINE_BITS_INF)
        low = run.last <= (GENUINE_SCALE_NAN if all_nan else GENUINE_SCALE_INF)
        return low and bits >= GENUINE_BITS_NAN

    def _facts(self, record: StepRecord) -> Facts:
        return Facts(record, self._course, self._slope, self.tensors)

    def _idle(self, record: StepRecord, found: list[Finding]) -> None:
        if self._course.none.length == HOPELESS_AFTER:
            found.append(grounds.idle(self._facts(record)))

    def _after_loss(self, record: StepRecord, steps: int, found: list[Finding]) -> None:
        """Say of a few losses that were not finite that they are over."""
        if self._course.loss.length or self._said.told:
            return
        self._said.losses += 1
        if _is_power_of_two(self._said.losses):
            facts = self._facts(record)
            found.append(grounds.loss(facts, steps, over=True, hopeless=False))

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
        elif loss.length >= LOSSES_HOPELESS_AFTER:
            found.append(grounds.loss(facts, loss.length, over=False, hopeless=True))
        elif verdict is Verdict.GENUINE:
            found.append(grounds.genuine(facts))
        elif run.length >= HOPELESS_AFTER and run.held == run.length - 1:
            found.append(grounds.fixed(facts, run.length, run.length, run.since))
        else:
            return
        self._said.told = found[-1].code

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
