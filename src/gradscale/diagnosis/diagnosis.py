"""Diagnoses a run from its file."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradscale.core.records import StepRecord, Verdict
from gradscale.diagnosis.culprits import Culprit
from gradscale.diagnosis.judged_run import JudgedRun
from gradscale.diagnosis.loss_curve import LossCurve
from gradscale.diagnosis.records import is_skipped
from gradscale.diagnosis.timeline import Phase, Timeline, phases_of
from gradscale.diagnosis.underflow import Underflow
from gradscale.judge.findings import Finding, Health
from gradscale.judge.history import Bounds, bounds_of
from gradscale.judge.observations import Place
from gradscale.judge.trend import TOP, exponent
from gradscale.runfile import Run, StepRow

# Steps between two calls of `on_steps`.
REPORT_EVERY = 4096
# The minimum number of steps to detect slow changes of scale, loss and gradients.
FEW_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of one run.

    Attributes:
        path: The run file.
        meta: The metadata of the run.
        steps: Steps in the file.
        applied: Steps that were applied.
        skipped: Steps that were skipped although there were gradients.
        verdicts: The number of steps with each verdict.
        findings: Most severe first, normal ones last.
        health: The state of the run as a whole.
        not_judged: Judgements that were not possible, with reasons; one sentence each.
        timeline: The scale at each step, and the steps that were not ok.
        losses: The loss over the steps.
        phases: The run divided into phases.
        culprits: The tensors that were not finite, the most frequent first.
        places: The locations of non-finite values that module hooks observed.
        underflow: The elements lost at this scale; None if nothing was sampled.
        bounds: The bounds of the policy; None if it has none or they are unknown.
        first: The first row; None if there is none.
        last: The last row.
        headroom: Bits between the largest gradient of the last finite step and 65504;
            None if unknown.
        seconds: The time from the first row to the last.
    """

    path: Path
    meta: Mapping[str, Any]
    steps: int
    applied: int
    skipped: int
    verdicts: Mapping[Verdict, int]
    findings: tuple[Finding, ...]
    health: Health
    not_judged: tuple[str, ...]
    timeline: Timeline
    losses: LossCurve
    phases: tuple[Phase, ...]
    culprits: tuple[Culprit, ...]
    places: tuple[Place, ...]
    underflow: Underflow | None
    bounds: Bounds | None
    first: StepRow | None
    last: StepRow | None
    headroom: float | None
    seconds: float

    @property
    def serious(self) -> tuple[Finding, ...]:
        """The findings that are not normal."""
        return tuple(finding for finding in self.findings if not finding.normal)

    def verdict_as_dict(self) -> dict[str, Any]:
        """Return the state and the findings, as `gradscale doctor` prints them."""
        findings = [finding.as_dict() for finding in self.serious]
        return {
            "verdict": str(self.health),
            "findings": findings,
            "not_judged": list(self.not_judged),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON object; numbers may be NaN or infinite."""
        low, high = self.timeline.range() if self.steps else (None, None)
        return {
            **self.verdict_as_dict(),
            "normal": [f.as_dict() for f in self.findings if f.normal],
            "file": str(self.path),
            "meta": dict(self.meta),
            "steps": self.steps,
            "applied": self.applied,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "verdicts": {str(verdict): n for verdict, n in self.verdicts.items()},
            "scale": {
                "first": self.first.scale if self.first else None,
                "last": self.last.scale if self.last else None,
                "lowest_log2": low,
                "highest_log2": high,
                "floor": self.bounds.floor if self.bounds else None,
                "ceiling": self.bounds.ceiling if self.bounds else None,
            },
            "headroom_bits": self.headroom,
            "phases": [phase.as_dict() for phase in self.phases],
            "culprits": [culprit.as_dict() for culprit in self.culprits],
            "places": [place._asdict() for place in self.places],
            "underflow": self.underflow.as_dict() if self.underflow else None,
        }


def diagnose_run(
    run: Run, *, on_steps: Callable[[int], None] | None = None
) -> Diagnosis:
    """Read a run and diagnose it.

    The judge is the same as for a live run, so the findings are those that were
    reported live. Repeated findings of one cause and location are merged, and a
    hopeless finding is cleared if the run recovered.

    >>> import tempfile
    >>> from gradscale.runfile import RunWriter, open_run
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunWriter(folder.name + "/run.gs") as writer:
    ...     for step in range(1, 120):
    ...         lost = step >= 100
    ...         code = "GS203" if lost else "GS000"
    ...         loss = float("nan") if lost else 2.5
    ...         writer.step(step, 65536.0, not lost, code, loss=loss)
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     diagnosis = diagnose_run(run)
    >>> folder.cleanup()
    >>> str(diagnosis.health), [(f.code, f.since) for f in diagnosis.findings]
    ('collapse', [('GS203', 100)])

    Args:
        run: Open for reading.
        on_steps: Called periodically with the number of steps read since the last
            call.
    """
    meta = run.meta
    judged = JudgedRun(run)
    judged.read_events()
    timeline, losses = Timeline(), LossCurve()
    first: StepRow | None = None
    row: StepRow | None = None
    fit: StepRecord | None = None
    applied = count = 0
    for row in run.steps():
        first = first or row
        _, record, verdict, _ = judged.see(row)
        applied += row.applied
        if record.finite and record.amax:
            fit = record
        timeline.note(row.step, row.scale, verdict, is_skipped(row))
        losses.add(row.step, row.loss)
        count += 1
        if on_steps is not None and count % REPORT_EVERY == 0:
            on_steps(REPORT_EVERY)
    found = judged.diagnosed()
    return Diagnosis(
        path=run.path,
        meta=meta,
        steps=count,
        applied=applied,
        skipped=timeline.skips(timeline.first, timeline.last),
        verdicts=timeline.verdicts(count),
        findings=tuple(found),
        health=Health.of(found),
        not_judged=tuple(_not_judged(count, judged.not_judged)),
        timeline=timeline,
        losses=losses,
        phases=phases_of(timeline),
        culprits=judged.culprits.top(),
        places=tuple(judged.culprits.places),
        underflow=judged.meter.table(),
        bounds=bounds_of(meta),
        first=first,
        last=row,
        headroom=None if fit is None else TOP - exponent(fit.amax),
        seconds=row.time - first.time if row and first else 0.0,
    )


def _not_judged(steps: int, noted: Iterable[str]) -> Iterator[str]:
    """Yield the judgements that were not possible, with reasons."""
    if not steps:
        yield "the run: it has no steps"
    elif steps < FEW_STEPS:
        yield f"trends: the run has {steps} steps, at least {FEW_STEPS} are needed"
    yield from noted
