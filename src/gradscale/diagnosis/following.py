"""Reads a run file while the run is still writing it."""

from itertools import islice
from typing import Any

from gradscale.diagnosis.judged_run import JudgedRow, JudgedRun
from gradscale.diagnosis.records import is_skipped
from gradscale.diagnosis.timeline import Timeline
from gradscale.judge.findings import Finding, Health
from gradscale.runfile import Run, StepRow

# Steps read per poll: about half a second.
AT_ONCE = 50_000


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
        findings: The diagnosis so far, most severe first.
        messages: Recorded messages that are new in the last poll.
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
        self.steps = 0
        self.findings: list[Finding] = []
        self.messages: list[Finding] = []
        self._begin()

    @property
    def health(self) -> Health:
        """The state of the run so far."""
        return Health.of(self.findings)

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far."""
        return self.timeline.skips(self.timeline.first, self.timeline.last)

    def poll(self) -> list[JudgedRow]:
        """Read new steps, 50,000 at most.

        If the run was resumed from an earlier step, it is read from the beginning.
        """
        # Read before the rows: rows written in between are read by the next poll.
        self.meta = self._run.meta
        ended = self.meta["end"]["state"] != "running"
        if self._run.last_step < self.timeline.last:
            self._begin()
        rows = list(islice(self._run.steps(self.timeline.last), AT_ONCE))
        # After the rows: a step is written before its events.
        self._judged.read_events()
        self.behind = len(rows) == AT_ONCE
        seen = [self._judged.see(row) for row in rows]
        for row, _, verdict, _ in seen:
            self.timeline.note(row.step, row.scale, verdict, is_skipped(row))
        if rows:
            self.last = rows[-1]
            self.steps += len(rows)
        self.ended = ended and not self.behind
        self.findings = self._judged.diagnosed()
        messages = [] if self.behind else self._judged.messages()
        self.messages = [each for each in messages if each.code not in self._shown]
        self._shown |= {each.code for each in messages}
        return seen

    def _begin(self) -> None:
        self._judged = JudgedRun(self._run)
        self.timeline = Timeline()
        self.findings, self.messages = [], []
        self._shown: set[str] = set()
        self.last = None
        self.steps = 0
