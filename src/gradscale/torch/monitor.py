"""What the host makes of late facts: a judgement, a word, a row of the run file."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from gradscale.core.judging import Judge, Judgement
from gradscale.core.verdicts import StepRecord, Verdict
from gradscale.errors import HopelessRun
from gradscale.torch.armed import Armed
from gradscale.torch.culprits import Diagnosis, order_of_backward
from gradscale.torch.kernels import Kernels
from gradscale.torch.ledger import Ledger, record_of
from gradscale.torch.mailbox import LAG, LateRow, Mailbox
from gradscale.torch.meter import Meter
from gradscale.torch.notices import Notice
from gradscale.torch.open_step import OpenStep
from gradscale.torch.recording import Recorder
from gradscale.torch.roots import root_of
from gradscale.torch.telling import bundle, say
from gradscale.torch.underflow_sample import UnderflowSample
from gradscale.torch.weights import WeightsLook, weights_of

# The distance of the steps that are sampled for sinks alone.
SAMPLE_EVERY = 100
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


class _Waiting(NamedTuple):
    """A row that waits to be judged.

    Attributes:
        due: The update in which it is judged; the same on every rank.
        record: Its facts.
        notice: Who was not finite; None if all were.
        weights: A look at the weights; None if nobody looked.
        sample: What the meter counted; None if it did not.
        behind: What each optimizer had done.
    """

    due: int
    record: StepRecord
    notice: Notice | None
    weights: WeightsLook | None
    sample: UnderflowSample | None
    behind: list[OpenStep]


class Monitor:
    """Judges the steps of a scaler as their facts arrive, and says what is to be said.

    Rows are judged in order, each in the same update on every rank.

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
        self._model = model
        self._recorder = recorder
        self._sinks = list(sinks)
        every = SAMPLE_EVERY if recorder is None else recorder.sample_every
        self.heard = recorder is not None or bool(self._sinks)
        self.meter = Meter(every if self.heard else None, kernels=kernels)
        self._samples: list[UnderflowSample] = []
        self._updates = 0
        self._behind: deque[list[OpenStep]] = deque(maxlen=LAG + 1)
        self._waiting: deque[_Waiting] = deque()
        self._records: deque[StepRecord] = deque(maxlen=REMEMBERED)
        self._bad = 0
        self._begun = False
        self._end: weakref.finalize[..., Any] | None = None
        self._searched = model is not None
        self._named: set[tuple[str | None, str]] = set()

    def look(self, ledger: Ledger, settled: Mapping[int, OpenStep]) -> None:
        """Take note of an update and of what the instruments saw, which syncs.

        Args:
            ledger: After the update.
            settled: What each optimizer has done.
        """
        self._updates += 1
        self._behind.append(list(settled.values()))
        self._samples = self.meter.due() if self.meter.turn() else []
        if self.armed.armed:
            record = record_of(ledger.total.row.tolist(), int(ledger.total.tally[0]))
            if record.finite and record.norm_finite:
                self.armed.well()
            else:
                self._tell_place(self.armed.finding(record.scale), record)

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

        def drain() -> None:
            # Not the owner's: it would never be let go of.
            self.armed.disarm()
            for _ in range(LAG):
                self.look(ledger, {})
                self.see(mailbox.exchange(ledger), None)
            self.hurry()
            self.armed.disarm()

        if recorder is None:
            self._end = weakref.finalize(owner, drain)
            return
        recorder.begin()
        recorder.before_end(drain)
        self._end = weakref.finalize(owner, recorder.close)
        # At the end of the process the recorder closes its file itself.
        self._end.atexit = False

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
        """Judge what is on its way, and close the run file."""
        if self._end is not None:
            self._end()
        self.hurry()
        self.armed.disarm()

    def _enqueue(self, late: LateRow, *, last: bool) -> None:
        record = record_of(late.row, late.step)._replace(loss=late.loss)
        if record.loss is not None and math.isfinite(record.loss):
            fits = abs(record.loss * record.scale) <= _LARGEST_F32
            record = record._replace(scaled_loss_finite=fits)
        # Steps that a graph has replayed were seen by nobody.
        full = last and len(self._behind) > LAG
        behind = self._behind[0] if full else []
        sample = self._samples[-1] if self._samples and full else None
        if sample is not None:
            record = record._replace(lost=sample.lost)
        notice = weights = None
        if record.read and not (record.finite and record.norm_finite):
            record = record._replace(nan=math.isnan(record.amax))
            notice = Notice(behind)
            weights = self._look_at_weights(record, behind)
        asked = [each for each in (notice, weights) if each is not None]
        wait = LAG if any(each.on_its_way for each in asked) else 0
        self._waiting.append(
            _Waiting(self._updates + wait, record, notice, weights, sample, behind)
        )

    def _look_at_weights(
        self, record: StepRecord, behind: list[OpenStep]
    ) -> WeightsLook | None:
        """Start a look at the weights where they may be the cause. No host sync."""
        suspect = not record.loss_finite or self._bad >= ARMED_AFTER - 1
        # Of sharded weights each rank has its own, and all must judge the same.
        alone = all(step.voice is None for step in behind)
        if not (suspect and alone and behind):
            return None
        optimizers = [s.optimizer for s in behind if s.optimizer is not None]
        return WeightsLook(weights_of(self._model_behind(behind), optimizers))

    def _model_behind(self, behind: list[OpenStep]) -> torch.nn.Module | None:
        """Return the model, looked for once if nobody gave it."""
        params = [p for s in behind if s.optimizer is not None for p in s.params()]
        if not self._searched and params:
            self._searched = True
            self._model = root_of(params)
        return self._model

    def _judge_next(self, state: Callable[[], dict[str, Any]] | None) -> None:
        _, record, notice, weights, sample, behind = self._waiting.popleft()
        culprits: list[str] = []
        peaks: Mapping[str, float] = {} if sample is None else sample.peaks
        if notice is not None:
            # Looked for once it is no ordinary overflow.
            late = self._bad >= ARMED_AFTER - 1
            model = self._model_behind(behind) if late else self._model
            culprits, _ = order_of_backward(
                notice.names(model), self.armed.order or None
            )
            if self._recorder is not None:
                peaks = notice.peaks(model)
            self._judge.tensors = max(self._judge.tensors, notice.tensors)
        lost_weights = [] if weights is None else weights.not_finite()
        if lost_weights:
            record, culprits = record._replace(weights_finite=False), lost_weights
        judged = self._judge.see(record, culprits)
        self._records.append(record)
        self._follow(record, judged, behind)
        if self._recorder is not None:
            self._recorder.see(record, judged, culprits, peaks)
            if sample is not None:
                self._recorder.sample(record.step, sample.rows())
        for sink in self._sinks:
            sink.see(record, judged)
        for finding in judged.findings:
            line, stops = "", False
            if finding.hopeless and self._guard == "raise" and state is not None:
                line = bundle(finding, self._records, state, self._recorder)
                stops = True
            if finding.code not in _SAID_ELSEWHERE:
                say(finding.text() + line, self._recorder, normal=finding.normal)
            if stops and finding.code not in _RAISED_ELSEWHERE:
                self.clear()
                raise HopelessRun(finding.text() + line, code=finding.code)

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
        model = self._model_behind(behind)
        if model is not None:
            self.armed.arm(model)

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
        text = f"{code} step {record.step}: first not finite\n{seen.text()}"
        say(text, self._recorder)
