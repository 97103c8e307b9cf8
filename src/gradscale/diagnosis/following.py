"""A run that is still going on, read as it grows."""

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

# Steps that are read before a viewer gets to see something: about half a second.
AT_ONCE = 50_000


class Seen(NamedTuple):
    """One new step.

    Attributes:
        row: As the run file has it.
        verdict: What it means.
        findings: What there is to say of it; nearly always nothing.
    """

    row: StepRow
    verdict: Verdict
    findings: tuple[Finding, ...]


class Follower:
    """Reads what is new in a run, and judges it as a live run is judged.

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
        steps: How many were read so far.
        timeline: Of all of them.
        findings: All that was said so far.
        messages: Those of the last look that no step tells.
        meta: What is known of the run as a whole, as of the last look.
        last: The last row; None if there is none.
        behind: There may be more to read at once.
        ended: The run said that it is over, and all of it was read.
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
        """The verdict on the run so far."""
        return Health.of(clear_recovered(self.findings, self._judge.healthy_at))

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far."""
        return self.timeline.skips(self.timeline.first, self.timeline.last)

    def poll(self) -> list[Seen]:
        """Read what is new, 50,000 steps at most.

        A run that went back is read from its beginning.
        """
        # Before the rows: what is written in between is read the next time.
        self.meta = self._run.meta
        ended = self.meta.get("end", {}).get("state", "running") != "running"
        if self._run.last_step < self.timeline.last:
            self._begin()
        # A step is written before its events: those of a later step are not here yet.
        events = list(self._run.events())
        rows = list(islice(self._run.steps(self.timeline.last), AT_ONCE))
        self.behind = len(rows) == AT_ONCE
        bad = any(not row.applied for row in rows)
        culprits = Culprits(self._run, events) if bad else None
        seen = []
        for row in rows:
            blamed = culprits is not None and not row.applied
            weights = row.verdict == Verdict.WEIGHTS_NONFINITE.code
            who = (
                culprits.at(row.step, weights=weights)
                if culprits and blamed
                else NO_TENSORS
            )
            record = self._records.of(row, bool(who.nan))
            verdict, said = self._judge.see(record, who.counted)
            self.findings += said
            self.timeline.note(row.step, row.scale, verdict, is_skipped(row))
            self.last = row
            self.steps += 1
            seen.append(Seen(row, verdict, said))
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
