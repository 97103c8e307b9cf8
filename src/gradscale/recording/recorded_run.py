"""One recorded run: judge, run file, sinks and console behind one call a step."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from gradscale.core.records import StepRecord, Verdict
from gradscale.errors import HopelessRun
from gradscale.judge.findings import Finding
from gradscale.judge.judge import Judge, Judgement
from gradscale.recording.bundle import write_bundle
from gradscale.recording.console import say
from gradscale.recording.process import FindProcess, process_from_environment
from gradscale.recording.recorder import Recorder
from gradscale.runfile import TensorSample

# Steps in a bundle.
BUNDLED_STEPS = 50
# The folder of bundles if there is no run file to put them beside.
BUNDLES = Path()


class Sink(Protocol):
    """Receives every judged step; see `gradscale.sinks`.

    The findings of a run are not reported on the console if one of its sinks has a
    true attribute `logs_findings`.
    """

    def see(self, record: StepRecord, judgement: Judgement) -> None:
        """Receive one step."""


class RecordedRun:
    """Judges the steps of a run; writes them, passes them to sinks, prints findings.

    The part of recording that all frameworks share. A framework integration builds one
    `StepRecord` a step and calls `record_step`. Not thread-safe.

    >>> run = RecordedRun()
    >>> for step in range(1, 4):
    ...     record = StepRecord(step, 65536.0, True, True)
    ...     print(run.record_step(record).verdict)
    ok
    ok
    ok
    >>> run.close()

    Args:
        recorder: Writes the run file; None to write none.
        sinks: Each receives every record and its judgement, in this order.
        guard: "raise" sets `hopeless` when no scale can help; "report" never does.
        quiet: Findings are recorded and not printed; implied by a quiet recorder.
        process: Returns the rank of this process; only rank 0 prints and writes
            bundles. Called when there is something to print.
        versions: Versions for the bundle, by name; that of the framework first.
        reported_elsewhere: Codes of findings that the framework integration reports;
            they are recorded and not printed.
        raised_elsewhere: Codes of findings for which the framework integration raises,
            in the call that gets a `state`. They are not printed: see `raised_text`.

    Attributes:
        judge: Judges the steps.
        recorder: As given.
        hopeless: The error for a run that no scale can help, once it is found and
            `guard` is "raise". The caller raises it once all its steps are recorded.
        raised_text: The text of the last finding in `raised_elsewhere`, for the error.
        records: The last steps, for a bundle.
    """

    def __init__(
        self,
        *,
        recorder: Recorder | None = None,
        sinks: Iterable[Sink] = (),
        guard: Literal["report", "raise"] = "report",
        quiet: bool = False,
        process: FindProcess = process_from_environment,
        versions: Mapping[str, str] | None = None,
        reported_elsewhere: Collection[str] = (),
        raised_elsewhere: Collection[str] = (),
    ) -> None:
        # The first one named is the framework of the scaler.
        framework = next(iter(versions or ()), "")
        self.judge = Judge(framework=framework)
        if recorder is not None:
            recorder.bind(framework=framework)
        self.recorder = recorder
        self.records: deque[StepRecord] = deque(maxlen=BUNDLED_STEPS)
        self._sinks = list(sinks)
        self._guard = guard
        self._quiet = quiet
        self._process = process
        self._versions = dict(versions or {})
        self._reported_elsewhere = frozenset(reported_elsewhere)
        self._raised_elsewhere = frozenset(raised_elsewhere)
        self._last_finding: Finding | None = None
        self.hopeless: HopelessRun | None = None
        self.raised_text = ""
        self._closed = False

    @property
    def observed(self) -> bool:
        """True if there is a run file or a sink."""
        return self.recorder is not None or bool(self._sinks)

    def begin(self) -> None:
        """Create the run file now, if this process writes one."""
        if self.recorder is not None:
            self.recorder.begin()

    def record_step(
        self,
        record: StepRecord,
        culprits: Sequence[str] = (),
        peaks: Mapping[str, float] | None = None,
        sample: Mapping[str, TensorSample] | None = None,
        *,
        state: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Judgement:
        """Judge one step, record it and report its findings. Never waits for the disk.

        An error of the run file stops the recording, an error of a sink drops the
        sink; both are reported once and not raised.

        Args:
            record: The step's facts. Steps come in order.
            culprits: The names of the tensors that were not finite.
            peaks: The largest scaled magnitude of each tensor, for a step with an
                event or a sampled one. Do not change it afterwards.
            sample: The counts of the underflow meter by tensor, likewise.
            state: Returns the scaler's state, for the bundle of a run that is stopped;
                None if the run is not to be stopped.
        """
        if self.recorder is not None:
            record = self.recorder.numbered(record)
        judgement = self.judge.see(record, culprits)
        self.records.append(record)
        if self.recorder is not None:
            self._write(self.recorder, record, judgement, culprits, peaks, sample)
        for sink in list(self._sinks):
            self._pass_on(sink, record, judgement)
        for finding in judgement.findings:
            self._report_finding(finding, state)
        return judgement

    def step_of_update(self, step: int) -> int:
        """Return the number of the current update in the run file.

        Args:
            step: Its number in the scaler.
        """
        return step if self.recorder is None else self.recorder.step_of_update(step)

    def step_of(self, record: StepRecord) -> int:
        """Return the number in the run file of the next record."""
        return (
            record.step
            if self.recorder is None
            else self.recorder.numbered(record).step
        )

    def observe(
        self,
        step: int,
        data: Mapping[str, Any],
        *,
        code: str = Verdict.OK.code,
        where: str | None = None,
    ) -> None:
        """Pass an observation to the judge and record it.

        Args:
            step: The step from which on it is valid, numbered as in the run file.
            data: JSON values; see `gradscale.judge.observations`.
            code: The code of the event.
            where: Its location.
        """
        self.judge.observe(step, data)
        if self.recorder is not None:
            self.recorder.event(code, step=step, where=where, data=dict(data))

    def report(self, text: str, *, normal: bool = False) -> None:
        """Log a text, or print it to stderr where no log handler is set; on rank 0.

        Args:
            text: May have several lines.
            normal: It reports no problem.
        """
        quiet = self._quiet or (self.recorder is not None and self.recorder.quiet)
        if not quiet:
            say(text, rank=self._process().rank, normal=normal)

    def write_bundle(
        self,
        parent: Path,
        state: Mapping[str, Any],
        save_batch: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a bundle of the last judged steps; return its folder.

        Args:
            parent: The folder in which it is created.
            state: The scaler's state.
            save_batch: Writes the batch to a given file; None to leave it out.
        """
        return write_bundle(
            parent,
            self._last_finding,
            list(self.records),
            state,
            self._versions,
            save_batch,
            run_file=None if self.recorder is None else self.recorder.path,
        )

    def close(self, end: str = "closed", **facts: object) -> None:
        """Report open findings and close the run file; a second call does nothing.

        Args:
            end: The end state, in a word.
            facts: Further facts about the end, JSON values.
        """
        for finding in () if self._closed else self.judge.end():
            self._report_finding(finding, None)
        self._closed = True
        if self.recorder is not None:
            self.recorder.close(end, **facts)

    def _pass_on(self, sink: Sink, record: StepRecord, judgement: Judgement) -> None:
        try:
            sink.see(record, judgement)
        except Exception as error:
            # User or third-party code, which may raise anything; it must not end the
            # run.
            self._sinks.remove(sink)
            self.report(
                f"{type(sink).__name__} raised {type(error).__name__} in step "
                f"{record.step}: {error}. It receives no further steps; the training "
                "is not affected. [GS308]"
            )

    def _write(
        self,
        recorder: Recorder,
        record: StepRecord,
        judgement: Judgement,
        culprits: Sequence[str],
        peaks: Mapping[str, float] | None,
        sample: Mapping[str, TensorSample] | None,
    ) -> None:
        recorder.see(record, judgement, culprits, peaks)
        if sample is not None:
            recorder.sample(record.step, sample)

    def _report_finding(
        self, finding: Finding, state: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        self._last_finding = finding
        text = finding.text()
        stops = finding.hopeless and self._guard == "raise" and state is not None
        if stops:
            assert state is not None
            text += self._bundle_line(state)
        logged = any(getattr(sink, "logs_findings", False) for sink in self._sinks)
        if finding.code in self._raised_elsewhere and state is not None:
            self.raised_text = text
        elif stops and self.hopeless is None:
            # Not printed as well: the error has the text.
            self.hopeless = HopelessRun(text, code=finding.code)
        elif finding.code not in self._reported_elsewhere and not logged:
            self.report(text, normal=finding.normal)

    def _bundle_line(self, state: Callable[[], Mapping[str, Any]]) -> str:
        """Write a bundle on rank 0; return the line that names it."""
        if self._process().rank != 0:
            return ""
        path = None if self.recorder is None else self.recorder.path
        try:
            folder = self.write_bundle(
                BUNDLES if path is None else path.parent, state()
            )
        except OSError as error:
            return f"\n  bundle none: it could not be written ({error})"
        return f"\n  bundle {folder}"
