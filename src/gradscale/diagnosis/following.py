"""Reads a run file while the run is still writing it."""

from itertools import islice
from typing import Any, NamedTuple

from gradscale.core.records import Verdict
from gradscale.diagnosis.culprits import NO_TENSORS, Culprits, tensors_in
from gradscale.diagnosis.messages import recorded
from gradscale.diagnosis.records import Records, bounds_of, is_skipped
from gradscale.diagnosis.timeline import Timeline
from gradscale.judge.findings import Finding, Health, clear_recovered
from gradscale.judge.judge import Judge
from gradscale.runfile import Run, StepRow

# Steps read per poll: about half a second.
AT_ONCE = 50_000


class Seen(NamedTuple):
    """One new step.

    Attributes:
        row: The row of the run file.
        verdict: The verdict on it.
        findings: New findings; empty for nearly every step.
    """

    row: StepRow
    verdict: Verdict
    findings: tuple[Finding, ...]


class Follower:
    """Reads new steps of a run and judges them as a live run is judged.

    >>> import tempfile
    >>> from gradscale.runfile import RunWriter, open_run
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = RunWriter(folder.name + "/run.gs")
    >>> writer.step(1, 65536.0, True, "GS000")
    >>> _ = writer.flush()
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     follower = Follower(run)
    ...     print([seen.row.step for seen in follower.poll()], follower.ended)
    ...     writer.step(2, 65536.0, False, "GS201")
    ...     writer.close()
    ...     print([str(seen.verdict) for seen in follower.poll()], follower.ended)
    [1] False
    ['calibrating'] True
    >>> folder.cleanup()

    Attributes:
        steps: Steps read so far.
        timeline: The timeline of these steps.
        findings: All findings so far.
        messages: Recorded messages of the last poll that the judge did not give.
        meta: The metadata of the run, as of the last poll.
        last: The last row; None if there is none.
        behind: More rows may be available at once.
        ended: The run has ended, and all of it was read.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.meta: dict[str, Any] = {}
        self.behind = self.ended = False
        self.last: StepRow | None = None
        self.messages: list[Finding] = []
        self._begin()

    @property
    def health(self) -> Health:
        """The state of the run so far."""
        return Health.of(clear_recovered(self.findings, self._judge.healthy_at))

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far."""
        return self.timeline.skips(self.timeline.first, self.timeline.last)

    def poll(self) -> list[Seen]:
        """Read new steps, 50,000 at most.

        If the run was resumed from an earlier step, it is read from the beginning.
        """
        # Read before the rows: rows written in between are read by the next poll.
        self.meta = self._run.meta
        ended = self.meta["end"]["state"] != "running"
        if self._run.last_step < self.timeline.last:
            self._begin()
        # A step is written before its events, so events never precede their step.
        events = list(self._run.events())
        rows = list(islice(self._run.steps(self.timeline.last), AT_ONCE))
        self.behind = len(rows) == AT_ONCE
        bad = any(not row.applied for row in rows)
        culprits = Culprits(self._run, events) if bad else None
        seen = []
        for row in rows:
            tensors = NO_TENSORS
            if culprits is not None and not row.applied:
                weights = row.verdict == Verdict.WEIGHTS_NONFINITE.code
                tensors = culprits.at(row.step, weights=weights)
            record = self._records.of(row, bool(tensors.nan))
            verdict, findings = self._judge.see(record, tensors.counted)
            self.findings += findings
            self.timeline.note(row.step, row.scale, verdict, is_skipped(row))
            self.last = row
            self.steps += 1
            seen.append(Seen(row, verdict, findings))
        self.ended = ended and not self.behind
        known = {finding.code for finding in self.findings}
        self.messages = [] if self.behind else recorded(events, known)
        self.findings += self.messages
        return seen

    def _begin(self) -> None:
        meta = self.meta or self._run.meta
        bounds = bounds_of(meta)
        self._records = Records(None if bounds is None else bounds.floor)
        self._judge = Judge(tensors=tensors_in(self._run, meta))
        self.timeline = Timeline()
        self.findings: list[Finding] = []
        self.last = None
        self.steps = 0
