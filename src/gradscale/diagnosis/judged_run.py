"""Judges the rows of a run file, as they were judged live."""

from collections.abc import Mapping
from typing import NamedTuple

from gradscale.core.records import StepRecord, Verdict
from gradscale.diagnosis.culprits import NO_TENSORS, Culprits, tensors_in
from gradscale.diagnosis.event_findings import recorded
from gradscale.diagnosis.records import Records, is_skipped
from gradscale.diagnosis.underflow import Meter
from gradscale.judge.finding_builders import Reported
from gradscale.judge.findings import (
    Finding,
    by_severity,
    clear_recovered,
    merge_repeats,
)
from gradscale.judge.judge import Judge
from gradscale.runfile import EventRow, Run, StepRow

_WEIGHTS = Verdict.WEIGHTS_NONFINITE.code


class JudgedRow(NamedTuple):
    """One row and its judgement.

    Attributes:
        row: The row of the run file.
        record: The record of the step, rebuilt.
        verdict: The verdict on it.
        findings: New findings; empty for nearly every step.
    """

    row: StepRow
    record: StepRecord
    verdict: Verdict
    findings: tuple[Finding, ...]


class JudgedRun:
    """Feeds rows and events of a run file to a judge, in the order of steps.

    The judge is that of a live run and gets the same facts, so it gives the same
    findings: those of a file that is cut off after some step are those that were
    reported live up to that step.

    Args:
        run: Open for reading.

    Attributes:
        culprits: The tensors and modules that were not finite.
        meter: The samples of the underflow meter.
        findings: The findings of the judge so far, in order.
    """

    def __init__(self, run: Run) -> None:
        meta = run.meta
        self._run = run
        self._records = Records(meta)
        self._judge = Judge(
            tensors=tensors_in(run, meta), framework=meta.get("framework", "")
        )
        self._events: list[EventRow] = []
        self._last_event = 0
        self._sampled: set[int] = set()
        self.culprits = Culprits(run)
        self.meter = Meter()
        self.findings: list[Finding] = []
        self._reported = Reported()

    def read_events(self) -> None:
        """Read the events that were written since the last call."""
        self._sampled = set(self._run.sampled_steps())
        new = list(self._run.events(self._last_event))
        self._events += new
        self.culprits.add(new)
        for event in sorted(new, key=lambda event: event.step or 0):
            self._last_event = max(self._last_event, event.id)
            if isinstance(event.data, Mapping):
                self._judge.observe(event.step or 0, event.data)

    def see(self, row: StepRow) -> JudgedRow:
        """Judge the next row. The events up to it have been read."""
        tensors, lost, layer = NO_TENSORS, None, ""
        if row.step in self._sampled:
            samples = list(self._run.samples(row.step))
            lost, layer = self.meter.add(row.step, row.scale, samples)
        if is_skipped(row):
            tensors = self.culprits.at(row.step, weights=row.verdict == _WEIGHTS)
        record = self._records.of(row, bool(tensors.nan), lost)
        if record.lost is not None:
            record = record._replace(lost_layer=layer)
        verdict, findings = self._judge.see(record, tensors.counted)
        self.findings += findings
        self._reported.add(findings, self._judge.episode)
        return JudgedRow(row, record, verdict, findings)

    def diagnosed(self) -> list[Finding]:
        """Return the findings if the run ended here, most severe first.

        Repeated findings of one cause and location are merged, hopeless ones are
        cleared if the run recovered, and recorded messages that the judge did not
        give are added.
        """
        reported = map(self._judge.up_to_now, self._reported.up_to_now())
        found = [*reported, *self._judge.end()]
        found = clear_recovered([*found, *self.messages()], self._judge.healthy_at)
        return by_severity(merge_repeats(found))

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Judgements that were not possible, with reasons; one sentence each."""
        return self._judge.not_judged

    def messages(self) -> list[Finding]:
        """Return the recorded messages that the judge did not give."""
        known = {finding.code for finding in self.findings}
        if "GS118" in known:
            # Each of the scalers has reported that it has no state.
            known.add("GS301")
        return recorded(self._events, known)
