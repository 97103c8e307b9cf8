"""What the host makes of late facts: a judgement, a word, a row of the run file."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import torch

from gradscale.core.records import StepRecord
from gradscale.errors import HopelessRun
from gradscale.judge.findings import Finding
from gradscale.judge.judge import Judge, Judgement
from gradscale.judge.verdict_table import codes_where, verdicts_where
from gradscale.recording.bundle import write_bundle
from gradscale.recording.console import say
from gradscale.recording.recorder import Recorder
from gradscale.torch.device_state.calm import STEPS, Calm
from gradscale.torch.device_state.host_copy import LAG, LateRow, Mailbox
from gradscale.torch.device_state.layout import Ledger, record_of
from gradscale.torch.kernels import Kernels
from gradscale.torch.locate.module_hooks import Armed
from gradscale.torch.monitor.draining import drain
from gradscale.torch.monitor.evidence import Case, Inquiry
from gradscale.torch.monitor.process import process_here
from gradscale.torch.monitor.reporting import LocationReport, bundle
from gradscale.torch.step.optimizer_step import OpenStep
from gradscale.torch.underflow.meter import Meter
from gradscale.torch.underflow.sample import UnderflowSample

# The distance of the steps that are sampled for sinks alone.
SAMPLE_EVERY = 100
# Steps that a bundle tells of.
REMEMBERED = 50
# Bad steps in a row, not explained by a scale that is being found, before the
# instruments are turned on.
ARMED_AFTER = 3
# And before one is looked at as no ordinary overflow any more.
SUSPECT = ARMED_AFTER - 1
_EXPLAINED = verdicts_where(lambda row: not row.module_hooks)
# Said as warnings where they happen.
_SAID_ELSEWHERE = codes_where(lambda row: row.warned)
# Raised by the guard at the floor, whatever `guard` is.
_RAISED_ELSEWHERE = codes_where(lambda row: row.raised)


class Monitor:
    """Judges the steps of a scaler as their facts arrive, and says what is to be said.

    Rows are judged in order, those in which something happened in the same update on
    every rank.

    Args:
        guard: "raise" stops a run that no scale can help.
        model: Names modules; None to look for it when something goes wrong.
        recorder: Writes the run file; None for none.
        sinks: Each gets every record and judgement.
        kernels: As for the scaler.

    Attributes:
        armed: The instruments.
        meter: The underflow meter; it samples where somebody hears of it.
        heard: There is a run file or a sink.
        quiet: Nothing is left to be done, so that calm steps may be put off.
    """

    def __init__(
        self,
        *,
        guard: str,
        model: torch.nn.Module | None,
        recorder: Recorder | None = None,
        sinks: Iterable[Any] = (),
        kernels: Kernels = "auto",
    ) -> None:
        self.armed = Armed()
        # Hooks are on all modules: a scaler that is gone must not leave them there.
        weakref.finalize(self, self.armed.disarm).atexit = False
        self._judge = Judge()
        self._guard = guard
        self._inquiry = Inquiry(model, peaks=recorder is not None)
        self._recorder = recorder
        self._sinks = list(sinks)
        every = SAMPLE_EVERY if recorder is None else recorder.sample_every
        self.heard = recorder is not None or bool(self._sinks)
        self.meter = Meter(every if self.heard else None, kernels=kernels)
        self.quiet = False
        self._sample: UnderflowSample | None = None
        self._updates = 0
        self._behind: deque[Mapping[int, OpenStep]] = deque(maxlen=LAG + 1)
        # Each with the update in which it is judged, the same on every rank.
        self._waiting: deque[tuple[int, Case]] = deque()
        self._records: deque[StepRecord] = deque(maxlen=REMEMBERED)
        self._calm = Calm()
        self._found: Finding | None = None
        self._bad = 0
        self._begun = False
        self._end: weakref.finalize[..., Any] | None = None
        self._places = LocationReport(recorder)

    def look(self, ledger: Ledger, settled: Mapping[int, OpenStep]) -> None:
        """Take note of an update and of what the instruments saw, which syncs.

        Args:
            ledger: After the update.
            settled: What each optimizer has done. Not to be changed afterwards.
        """
        self._updates += 1
        self._behind.append(settled)
        self._sample = self.meter.end_step()
        if self.armed.armed:
            record = record_of(ledger.total.row.tolist(), int(ledger.total.tally[0]))
            if record.finite and record.norm_finite:
                self.armed.well()
                if not self.armed.armed:
                    self._places.clear()
            else:
                self._places.say(self.armed.finding(record.scale), record.step)

    def begin(self, owner: Any, mailbox: Mailbox, ledger: Ledger) -> None:
        """Make the run file, if there is to be one and it is not there yet.

        Args:
            owner: With whom all is closed, if the process does not end before.
            mailbox, ledger: What is on its way at the end comes from them.

        Raises:
            StateError: The file cannot be made, or is there already.
        """
        recorder = self._recorder
        if self._begun or not self.heard:
            return
        self._begun = True
        last = partial(drain, self, mailbox, ledger, os.getpid())
        if recorder is None:
            self._end = weakref.finalize(owner, last)
            return
        recorder.begin()
        self._calm.write_to(recorder.writer)
        recorder.before_end(last)
        self._end = weakref.finalize(owner, recorder.let_go)
        # At the end of the process the recorder closes its file itself.
        self._end.atexit = False

    def pass_by(
        self, settled: Mapping[int, OpenStep], mailbox: Mailbox, has_loss: bool
    ) -> bool:
        """Do all that is to be done if the step that is due is calm; return whether.

        In the place of `look`, `exchange` and `see`. Calls no more than it must.
        """
        meter, calm = self.meter, self._calm
        if not self.quiet or meter.step + 1 >= meter.busy_at:
            return False
        late = mailbox.calm(has_loss=has_loss)
        if late is None:
            return False
        self._updates += 1
        meter.step += 1
        self._behind.append(settled)
        now = time()
        calm.append((*late, now))
        if len(calm) >= STEPS or now >= calm.until:
            self._judge_calm()
        return True

    def put_off(self, late: list[LateRow] | None) -> bool:
        """Put off the step that is due, if it is calm; return whether it is."""
        kept = self.quiet and self._sample is None and self._calm.keeps(late)
        if kept and self._calm.is_time():
            self._judge_calm()
        return kept

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
        self._judge_calm()
        for one in late:
            self._enqueue(one, last=one is late[-1])
        self.quiet = False
        while self._waiting and self._waiting[0][0] <= self._updates:
            self._judge_next(state)
        busy = self._waiting or self._sinks or self.armed.armed
        self.quiet = self._judge.settled and not busy

    def clear(self) -> None:
        """Forget what waits to be judged."""
        self._waiting.clear()

    def hurry(self, state: Callable[[], dict[str, Any]] | None = None) -> None:
        """Judge what waits, now. Syncs.

        Args:
            state: As in `see`; None to write no bundle and stop nothing.
        """
        self._judge_calm()
        while self._waiting:
            self._judge_next(state)

    def write_bundle(self, parent: Path, state: dict[str, Any], batch: Any) -> Path:
        """Write the evidence of the last steps that have been judged."""
        self._judge_calm()
        save = None if batch is None else partial(torch.save, batch)
        versions = {"torch": torch.__version__}
        records = list(self._records)
        return write_bundle(parent, self._found, records, state, versions, save)

    def close(self) -> None:
        """Judge what is on its way, and close the run file."""
        if self._end is not None:
            self._end()
        elif self._recorder is not None:
            self._recorder.close()
        self.hurry()
        self.armed.disarm()

    def _judge_calm(self) -> None:
        """Judge the steps that were put off."""
        for one in self._calm.take():
            self._bad = 0
            record = record_of(one.row, one.step, one.loss)
            self._judge_row(record, None, written=True)

    def _enqueue(self, late: LateRow, *, last: bool) -> None:
        # Steps that a graph has replayed were seen by nobody.
        seen = last and len(self._behind) > LAG
        steps = list(self._behind[0].values()) if seen else []
        sample = self._sample if seen else None
        case = self._inquiry.begin(late, steps, sample, suspect=self._bad >= SUSPECT)
        due = self._updates + (LAG if case.on_its_way else 0)
        self._waiting.append((due, case))

    def _judge_next(self, state: Callable[[], dict[str, Any]] | None) -> None:
        _, case = self._waiting.popleft()
        order, suspect = self.armed.order, self._bad >= SUSPECT
        found = self._inquiry.end(case, order, suspect=suspect)
        self._judge.tensors = max(self._judge.tensors, found.tensors)
        judged = self._judge_row(
            found.record, state, found.culprits, found.peaks, case.sample
        )
        self._follow(found.record, judged, case.steps)

    def _judge_row(
        self,
        record: StepRecord,
        state: Callable[[], dict[str, Any]] | None,
        culprits: Sequence[str] = (),
        peaks: Mapping[str, float] | None = None,
        sample: UnderflowSample | None = None,
        written: bool = False,
    ) -> Judgement:
        """Judge a step, write it down, and say what there is to say."""
        judged = self._judge.see(record, culprits)
        self._records.append(record)
        if self._recorder is not None:
            if not written:
                self._recorder.row(record, judged.verdict)
            self._recorder.details(record, judged, culprits, peaks)
            if sample is not None:
                self._recorder.sample(record.step, sample.rows())
        for sink in self._sinks:
            sink.see(record, judged)
        for finding in judged.findings:
            self._found = finding
            line, stops = "", False
            if finding.hopeless and self._guard == "raise" and state is not None:
                line = bundle(finding, self._records, state, self._recorder)
                stops = True
            if finding.code not in _SAID_ELSEWHERE:
                rank = process_here().rank
                text = finding.text() + line
                say(text, self._recorder, rank=rank, normal=finding.normal)
            if stops and finding.code not in _RAISED_ELSEWHERE:
                self.clear()
                raise HopelessRun(finding.text() + line, code=finding.code)
        return judged

    def _follow(
        self, record: StepRecord, judged: Judgement, steps: Sequence[OpenStep]
    ) -> None:
        """Turn the instruments on once a failure is no longer an ordinary one."""
        if record.finite and record.norm_finite:
            self._bad = 0
        elif judged.verdict not in _EXPLAINED:
            self._bad += 1
        if self._bad < ARMED_AFTER or self.armed.armed:
            return
        model = self._inquiry.model_behind(steps)
        if model is not None:
            self.armed.arm(model)
