"""What the host makes of late facts: a judgement, a word, a row of the run file."""

import logging
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradscale.core.findings import Finding
from gradscale.core.judging import Judge, Judgement
from gradscale.core.verdicts import StepRecord, Verdict
from gradscale.errors import HopelessRun
from gradscale.torch.armed import Armed
from gradscale.torch.bundles import write_bundle
from gradscale.torch.culprits import Diagnosis, order_of_backward
from gradscale.torch.ledger import Ledger, record_of
from gradscale.torch.mailbox import LAG, LateRow, Mailbox
from gradscale.torch.notices import Notice
from gradscale.torch.open_step import OpenStep
from gradscale.torch.recording import Recorder, rank_here
from gradscale.torch.roots import root_of

# Where bundles go if there is no run file beside which they could lie.
BUNDLES = Path()
# Steps that a bundle tells of.
REMEMBERED = 50
# Bad steps in a row, not explained by a scale that is being found, before the
# instruments are turned on.
ARMED_AFTER = 3
_EXPLAINED = (Verdict.CALIBRATING, Verdict.PROBING, Verdict.NO_GRADIENTS)
# Said as warnings where they happen.
_SAID_ELSEWHERE = ("GS103", "GS205")
# Raised by the guard at the floor, whatever `guard` is.
_RAISED_ELSEWHERE = ("GS202",)
_LARGEST_F32 = torch.finfo(torch.float32).max

_log = logging.getLogger("gradscale")


class _Waiting(NamedTuple):
    """A row that waits to be judged.

    Attributes:
        due: The update in which it is judged; the same on every rank.
        record: Its facts.
        notice: Who was not finite; None if all were.
        behind: What each optimizer had done.
    """

    due: int
    record: StepRecord
    notice: Notice | None
    behind: list[OpenStep]


class Monitor:
    """Judges the steps of a scaler as their facts arrive, and says what is to be said.

    Rows are judged in order, each in the same update on every rank.

    Args:
        guard: "raise" stops a run that no scale can help.
        model: Names modules; None to look for it when something goes wrong.
        recorder: Writes the run file; None for none.
        sinks: Each gets every record and judgement.
    """

    def __init__(
        self,
        *,
        guard: str,
        model: torch.nn.Module | None,
        recorder: Recorder | None = None,
        sinks: Iterable[Any] = (),
    ) -> None:
        self.armed = Armed()
        self._judge = Judge()
        self._guard = guard
        self._model = model
        self._recorder = recorder
        self._sinks = list(sinks)
        self._updates = 0
        self._behind: deque[list[OpenStep]] = deque(maxlen=LAG + 1)
        self._waiting: deque[_Waiting] = deque()
        self._records: deque[StepRecord] = deque(maxlen=REMEMBERED)
        self._bad = 0
        self._named: set[tuple[str | None, str]] = set()

    def look(self, ledger: Ledger, settled: Mapping[int, OpenStep]) -> None:
        """Take note of an update and of what the instruments saw, which syncs.

        Args:
            ledger: After the update.
            settled: What each optimizer has done.
        """
        self._updates += 1
        self._behind.append(list(settled.values()))
        if self.armed.armed:
            record = record_of(ledger.total.row.tolist(), int(ledger.total.tally[0]))
            if record.finite and record.norm_finite:
                self.armed.well()
            else:
                self._tell_place(self.armed.finding(record.scale), record)

    def begin(self, owner: Any, mailbox: Mailbox, ledger: Ledger) -> None:
        """Make the run file, if there is to be one and it is not there yet.

        Args:
            owner: With whom the file is closed, if the process does not end before.
            mailbox, ledger: What is on its way at the end comes from them.

        Raises:
            StateError: The file cannot be made, or is there already.
        """
        recorder = self._recorder
        if recorder is None or recorder.begun:
            return
        recorder.begin()

        def drain() -> None:
            # Not the owner's: it would never be let go of.
            self.armed.disarm()
            for _ in range(LAG):
                self.look(ledger, {})
                self.see(mailbox.exchange(ledger), None)
            self.hurry()
            self.armed.disarm()

        recorder.before_end(drain)
        # At the end of the process the recorder closes its file itself.
        weakref.finalize(owner, recorder.close).atexit = False

    def see(
        self, late: list[LateRow] | None, state: Callable[[], dict[str, Any]] | None
    ) -> None:
        """Judge the rows that are due.

        Args:
            late: What the mailbox returned for this update.
            state: Returns the scaler's state, for a bundle; None to stop nothing.

        Raises:
            HopelessRun: No scale can help, and `guard` is "raise".
        """
        late = late or []
        for one in late:
            self._enqueue(one, last=one is late[-1])
        while self._waiting and self._waiting[0].due <= self._updates:
            self._judge_next(state)

    def clear(self) -> None:
        """Forget what waits to be judged."""
        self._waiting.clear()

    def hurry(self, state: Callable[[], dict[str, Any]] | None = None) -> None:
        """Judge what waits, now. Syncs.

        Args:
            state: As in `see`; None to write no bundle and stop nothing.
        """
        while self._waiting:
            self._judge_next(state)

    def close(self) -> None:
        """Judge what is left, and close the run file."""
        self.hurry()
        self.armed.disarm()
        if self._recorder is not None:
            self._recorder.close()

    def _enqueue(self, late: LateRow, *, last: bool) -> None:
        record = record_of(late.row, late.step)._replace(loss=late.loss)
        if record.loss is not None and math.isfinite(record.loss):
            fits = abs(record.loss * record.scale) <= _LARGEST_F32
            record = record._replace(scaled_loss_finite=fits)
        # Steps that a graph has replayed were seen by nobody.
        full = last and len(self._behind) > LAG
        behind = self._behind[0] if full else []
        notice = None
        if record.read and not (record.finite and record.norm_finite):
            record = record._replace(nan=math.isnan(record.amax))
            notice = Notice(behind)
        wait = LAG if notice is not None and notice.on_its_way else 0
        self._waiting.append(_Waiting(self._updates + wait, record, notice, behind))

    def _judge_next(self, state: Callable[[], dict[str, Any]] | None) -> None:
        _, record, notice, behind = self._waiting.popleft()
        culprits: list[str] = []
        if notice is not None:
            culprits, _ = order_of_backward(notice.names(), self.armed.order or None)
        judged = self._judge.see(record, culprits)
        self._records.append(record)
        self._follow(record, judged, behind)
        if self._recorder is not None:
            self._recorder.see(record, judged, culprits)
        for sink in self._sinks:
            sink.see(record, judged)
        for finding in judged.findings:
            bundle, stops = "", False
            if finding.hopeless and self._guard == "raise" and state is not None:
                bundle, stops = self._bundle(finding, state), True
            if finding.code not in _SAID_ELSEWHERE:
                self._say(finding.text() + bundle, normal=finding.normal)
            if stops and finding.code not in _RAISED_ELSEWHERE:
                self.clear()
                raise HopelessRun(finding.text() + bundle, code=finding.code)

    def _follow(
        self, record: StepRecord, judged: Judgement, behind: list[OpenStep]
    ) -> None:
        """Turn the instruments on once a failure is no longer an ordinary one."""
        if record.finite and record.norm_finite:
            self._bad = 0
        elif judged.verdict not in _EXPLAINED:
            self._bad += 1
        if self._bad < ARMED_AFTER or self.armed.armed:
            return
        if self._model is None:
            params = [p for s in behind if s.optimizer is not None for p in s.params()]
            self._model = root_of(params)
        if self._model is not None:
            self.armed.arm(self._model)

    def _tell_place(self, seen: Diagnosis, record: StepRecord) -> None:
        place = seen.module, seen.direction
        if not seen.found or place in self._named:
            return
        self._named.add(place)
        code = Verdict.OVERFLOW.value if seen.loss_finite else "GS203"
        if self._recorder is not None:
            self._recorder.event(
                code, step=record.step, where=seen.module, data=seen.as_dict()
            )
        self._say(f"{code} step {record.step}: first not finite\n{seen.text()}")

    def _bundle(self, finding: Finding, state: Callable[[], dict[str, Any]]) -> str:
        """Write a bundle, on rank 0 alone; return the line that names it."""
        if rank_here() != 0:
            return ""
        parent = BUNDLES
        if self._recorder is not None and self._recorder.path is not None:
            parent = self._recorder.path.parent
        try:
            folder = write_bundle(parent, finding, self._records, state())
        except OSError as error:
            return f"\n  bundle none: it could not be written ({error})"
        return f"\n  bundle {folder}"

    def _say(self, text: str, *, normal: bool = False) -> None:
        """Log, or print where nobody listens; on rank 0 alone."""
        if (self._recorder is not None and self._recorder.quiet) or rank_here() != 0:
            return
        if _log.hasHandlers():
            _log.log(logging.INFO if normal else logging.WARNING, text)
        else:
            print(f"gradscale {text}", file=sys.stderr)
