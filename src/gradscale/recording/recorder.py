"""Writes the judged steps of a run into its run file."""

import os
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.formatting import run_counts
from gradscale.core.records import StepRecord, Verdict
from gradscale.errors import GradscaleError, GradscaleWarning, StateError
from gradscale.judge.judge import Judgement
from gradscale.judge.verdict_table import BY_VERDICT
from gradscale.recording.console import say
from gradscale.recording.process import FindProcess, Process, process_from_environment
from gradscale.runfile import RunWriter, TensorSample, path_for_rank
from gradscale.runfile.committer import THREAD
from gradscale.runfile.creation import check_path, numbered_paths
from gradscale.runfile.process_hooks import AtExit
from gradscale.runfile.writer import check_sample_every

# Culprits listed by name; their number is always recorded.
MOST_NAMES = 20


class Recorder:
    """Writes the judged steps of a run into a run file.

    The constructor checks that the file can be created; it is created at the first
    step, by rank 0 alone, and never by a data-loader worker or by a process forked from
    the one that constructed the recorder. A name that is taken gets a number: run.2.gs,
    run.3.gs and so on. A failure after construction stops the recording, is reported
    once and never raised.

    >>> import tempfile
    >>> from gradscale.judge.judge import Judge
    >>> from gradscale.core.policies import DynamicScale
    >>> from gradscale.runfile import open_run
    >>> folder = tempfile.TemporaryDirectory()
    >>> recorder = Recorder(folder.name + "/run.gs", policy=DynamicScale(), rank=0)
    >>> judge, step = Judge(), StepRecord(1, 65536.0, False, False, calibrated=False)
    >>> recorder.see(step, judge.see(step), ["head.weight"])
    >>> recorder.close()
    >>> with open_run(recorder.path) as run:
    ...     [(row.scale, row.verdict) for row in run.steps()]
    ...     [(event.code, event.where) for event in run.events()]
    ...     run.meta["policy"]["growth_interval"]
    [(65536.0, 'GS002')]
    [('GS002', 'head.weight')]
    2000
    >>> folder.cleanup()

    Args:
        path: The file; by convention it ends in .gs. A relative path is resolved at
            construction: a later `os.chdir` does not move it.
        policy: The policy in use, for `meta`; None if it is not known.
        names: Returns the names of the parameters, for `meta`.
        rank: The rank of this process; None to determine it at the first step.
        process: Returns the rank, the number of ranks and whether this is a
            data-loader worker; by default, from the environment. See `bind`.
        resume: Continue an existing file. Nothing that is recorded is erased: if the
            steps go back, to a checkpoint or to a new start, new rows replace the
            repeated ones, and the file as it was is kept under the next free number
            (run.2.gs). A file that another process still writes is not continued, but
            counts as taken.
        numbered: Number the file if its name is taken; if False, raise.
        quiet: Findings are written and not printed, nor is the line that names the
            file at the end.
        made: Called with the path once the file is created.
        failed: Called if the file cannot be created or the recording stops, instead of
            raising or reporting.
        meta: Further entries of `meta`, JSON values.
        sample_every: Interval, in steps, at which peaks and histograms are kept.
        every_rank: The other ranks write their own facts too: rank 3 into
            run.rank3.gs.

    Raises:
        StateError: The folder does not exist or is not writable (GS308), the file
            cannot be continued (GS306, GS307), or it exists and `numbered` is False
            (GS305).

    Attributes:
        path: The file; None before the first step and if this process writes none.
        writer: Writes the file; None if this process writes none.
        quiet: As given.
        begun: `begin` was called.
        sample_every: As given.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        policy: AnyPolicy | None = None,
        names: Callable[[], Sequence[str]] | None = None,
        rank: int | None = None,
        process: FindProcess | None = None,
        resume: bool = False,
        numbered: bool = True,
        quiet: bool = False,
        made: Callable[[Path], None] | None = None,
        failed: Callable[[GradscaleError | GradscaleWarning], None] | None = None,
        meta: Mapping[str, Any] | None = None,
        sample_every: int = 100,
        every_rank: bool = False,
    ) -> None:
        self.path: Path | None = None
        check_sample_every(sample_every)
        self.sample_every = sample_every
        self._every_rank = every_rank
        self.quiet = quiet
        self._policy = policy
        self._names = names
        self._rank = rank
        self._process = process
        self._resume = resume
        self._numbered = numbered
        self._made = made
        self._failed = failed
        self._meta = dict(meta or {})
        self._pid = os.getpid()
        self.writer: RunWriter | None = None
        self.begun = False
        self._written_as = 0
        self._at_exit: AtExit | None = None
        self._before_end: Callable[[], None] | None = None
        self._draining = False
        self._culprits: tuple[str, ...] = ()
        self._steps = self._skipped = self._idle = 0
        self._framework = ""
        self._early_events: list[tuple[str, dict[str, Any]]] = []
        self._wanted = Path(path)
        try:
            self._resolve()
        except StateError as error:
            if failed is None:
                raise
            self.begun = True
            failed(error)

    def _resolve(self) -> None:
        """Make the path absolute and check it, in a process that may write it."""
        try:
            self._wanted = self._wanted.absolute()
        except OSError as error:
            raise StateError(
                f"The run file {self._wanted} cannot be written: the working directory "
                f"does not exist ({error}). The run could not be recorded. Pass an "
                "absolute path, or train without a record.",
                code="GS308",
            ) from error
        process = (self._process or process_from_environment)()
        rank = process.rank if self._rank is None else self._rank
        if (rank == 0 or self._every_rank) and not process.worker:
            path = path_for_rank(self._wanted, rank)
            check_path(path, resume=self._resume, numbered=self._numbered)

    def bind(
        self,
        *,
        policy: AnyPolicy | None = None,
        names: Callable[[], Sequence[str]] | None = None,
        process: FindProcess | None = None,
        made: Callable[[Path], None] | None = None,
        framework: str = "",
    ) -> None:
        """Set the arguments that were not given, before the first step.

        Called by a scaler, with its policy, its model and its framework.
        """
        self._framework = self._framework or framework
        self._made = made if self._made is None else self._made
        self._policy = policy if self._policy is None else self._policy
        self._names = names if self._names is None else self._names
        self._process = process if self._process is None else self._process

    def begin(self) -> bool:
        """Create the file at the first call; return whether this process writes one.

        A failure is reported, and nothing is recorded.
        """
        if not self.begun:
            self.begun = True
            process = (self._process or process_from_environment)()
            if os.getpid() == self._pid and not process.worker:
                try:
                    self._open(process)
                except StateError as error:
                    if self._failed is None:
                        say(str(error), rank=0)
                    else:
                        self._failed(error)
        return self.writer is not None

    def _open(self, process: Process) -> None:
        rank = process.rank if self._rank is None else self._rank
        if rank != 0 and not self._every_rank:
            return
        names = self._parameter_names()
        meta = {
            "policy": described(self._policy),
            "parameters": names,
            "framework": self._framework,
            **self._meta,
        }
        self.writer = self._open_writer(process._replace(rank=rank), meta)
        self._written_as = rank
        self.path = self.writer.path
        assert self.path is not None
        if self._made is not None:
            self._made(self.path)
        if self.path.name != self._wanted.name and rank == 0 and not self.quiet:
            name = self._wanted.name
            text = f"{name} exists: the run is recorded in {self.path.name}"
            say(text, rank=0, normal=True)
        for code, facts in self._early_events:
            self.writer.event(code, **facts)
        # Registered after the writer's own, so that it runs before it.
        self._at_exit = AtExit(self._end_of_process)

    def _parameter_names(self) -> list[str]:
        names = [] if self._names is None else _listed(self._names)
        if names:
            # Released: it may refer to the scaler that owns this object.
            self._names = None
        return names

    def _open_writer(self, process: Process, meta: dict[str, Any]) -> RunWriter:
        """Return the writer of the first file whose name is not taken."""
        for path in numbered_paths(self._wanted):
            try:
                return RunWriter(
                    path,
                    meta=meta,
                    resume=self._resume,
                    rank=process.rank,
                    world_size=process.world_size,
                    every_rank=self._every_rank,
                    sample_every=self.sample_every,
                    report=self._failed,
                )
            except StateError as error:
                if not self._numbered or error.code != "GS305":
                    raise
        raise AssertionError("numbered_paths() is endless")

    def before_end(self, drain: Callable[[], None]) -> None:
        """Call `drain` before the file is closed, to record steps in flight."""
        self._before_end = drain

    def trains(self, optimizers: Iterable[Any], *, resumed: bool = False) -> None:
        """Note the optimizers of a scaler's first update, if the file is shared.

        Args:
            optimizers: They may have been stepped by another scaler.
            resumed: One of them has continued from a checkpoint, the scaler has not.
        """

    def begin_update(self, start: int = 0) -> None:
        """Number an update, if the file is shared.

        Args:
            start: The steps before the first one, of a run that is resumed.
        """

    def step_of_update(self, step: int) -> int:
        """Return the number of the current update in the file.

        Args:
            step: Its number in the scaler.
        """
        return step

    def numbered(self, record: StepRecord) -> StepRecord:
        """Return a record with its number in the file."""
        return record

    def see(
        self,
        record: StepRecord,
        judgement: Judgement,
        culprits: Sequence[str] = (),
        peaks: Mapping[str, float] | None = None,
    ) -> None:
        """Record one step. Never waits for the disk.

        Args:
            record: The step's facts. Steps come in order.
            judgement: Their judgement.
            culprits: The names of the tensors that were not finite.
            peaks: The largest scaled magnitude of each tensor, for a step with an
                event or a sampled one. Do not change it afterwards.
        """
        if not self.begun:
            self.begin()
        writer = self.writer
        if writer is None:
            return
        step, verdict = record.step, judgement.verdict.value
        self._steps += 1
        if not record.applied:
            idle = judgement.verdict is Verdict.NO_GRADIENTS
            self._idle += idle
            self._skipped += not idle and BY_VERDICT[judgement.verdict].skipped
        writer.step(
            step,
            record.scale,
            record.applied,
            verdict,
            norm=record.grad_norm,
            amax=record.amax if record.read else None,
            loss=record.loss,
        )
        for finding in judgement.findings:
            where = finding.where or None
            writer.event(finding.code, step=step, where=where, data=finding.as_dict())
        if culprits and tuple(culprits) != self._culprits:
            # Repeated ones would only fill the file.
            self._culprits = tuple(culprits)
            named = {"culprits": self._culprits[:MOST_NAMES], "count": len(culprits)}
            writer.event(verdict, step=step, where=culprits[0], data=named)
        if peaks:
            writer.peaks(step, peaks)

    def sample(self, step: int, samples: Mapping[str, TensorSample]) -> None:
        """Record the counts of the underflow meter at a step, by tensor."""
        if self.writer is not None:
            self.writer.samples(step, samples)

    def event(self, code: str, **facts: Any) -> None:
        """Record an event that is not a finding of the judge.

        Events before the first step are kept until the file is created.
        """
        if self.writer is not None:
            self.writer.event(code, **facts)
        elif not self.begun:
            self._early_events.append((code, facts))

    def close(self, end: str = "closed", **facts: object) -> None:
        """Write the remaining rows and the end state; a second call does nothing.

        Args:
            end: The end state, in a word.
            facts: Further facts about the end, JSON values.
        """
        if self._draining:
            # A finalizer during the drain, which still records rows.
            return
        self._drain()
        if self._at_exit is not None:
            self._at_exit.cancel()
            self._at_exit = None
        if self.writer is not None:
            self._report_end(self.writer)
            self.writer.close(end, **facts)
            self.writer = None

    def _end_of_process(self) -> None:
        self._drain()
        if self.writer is not None:
            self._report_end(self.writer)

    def _report_end(self, writer: RunWriter) -> None:
        """Report the number of steps and the file, once, in the recording process."""
        steps, self._steps = self._steps, 0
        if not steps or self.quiet or not writer.recording or writer.path is None:
            return
        file = writer.path
        # The working directory may be gone.
        with suppress(OSError, ValueError):
            file = file.relative_to(Path.cwd())
        counts = run_counts(steps, self._skipped, self._idle)
        text = f"{counts} recorded in {file}. Next: gradscale doctor"
        say(f"{text} {shlex.quote(str(file))}", rank=self._written_as, normal=True)

    def let_go(self) -> None:
        """Close the file; for a finalizer, which may run in any thread."""
        if threading.current_thread().name == THREAD:
            # close() in the writer's thread would wait for itself.
            threading.Thread(target=self.close, name="gradscale-close").start()
        else:
            self.close()

    def _drain(self) -> None:
        drain, self._before_end = self._before_end, None
        if drain is not None and os.getpid() == self._pid:
            self._draining = True
            try:
                drain()
            finally:
                self._draining = False


def _listed(names_of: Callable[[], Sequence[str]]) -> list[str]:
    try:
        return list(names_of())
    except Exception:
        # named_parameters() may be user code, which may raise anything; a record
        # without names must not end the run.
        return []


def described(policy: AnyPolicy | None) -> dict[str, Any] | None:
    """Return the entry of `meta` for a policy."""
    if policy is None:
        return None
    return {"kind": type(policy).__name__, **asdict(policy)}
