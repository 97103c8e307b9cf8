"""Writes the judged steps of a run into its run file."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.records import StepRecord, Verdict
from gradscale.errors import GradscaleError, StateError
from gradscale.judge.judge import Judgement
from gradscale.recording.process import FindProcess, Process, process_from_environment
from gradscale.runfile import RunWriter, TensorSample
from gradscale.runfile.committer import THREAD
from gradscale.runfile.process_hooks import AtExit

# So many culprits are listed by name; their number is told in any case.
MOST_NAMES = 20


class Recorder:
    """Writes what a run's judge has seen into a run file.

    The file is made at the first step, by rank 0 alone, and never by a data-loader
    worker or by a process forked from the one that made the recorder.

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
        path: The file; by custom it ends in .gs.
        policy: The policy in use, for `meta`; None if it is not known.
        names: Returns the names of the parameters, for `meta`.
        rank: Which rank this is; None to find out at the first step.
        process: Returns the rank, the number of ranks and whether this is a
            data-loader worker; by default, from the environment. See `bind`.
        resume: Go on with a file that is there.
        numbered: Where the name is taken take run.2.gs, run.3.gs and so on, for
            processes and scalers that know nothing of one another.
        quiet: What is found is written and not printed.
        made: Called with the file once it is made.
        failed: Called if it cannot be made, instead of raising.
        meta: What else is to be known of the run, as JSON has it.
        sample_every: The distance of the steps whose peaks and histograms are kept.
        every_rank: The other ranks write too, what they know of themselves: rank 3
            into run.rank3.gs.

    Attributes:
        path: The file that is written; None before the first step and where none is.
        writer: What writes it; None if nothing does.
        quiet: As given.
        begun: The first step was seen, and a file was made if one is to be.
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
        numbered: bool = False,
        quiet: bool = False,
        made: Callable[[Path], None] | None = None,
        failed: Callable[[GradscaleError], None] | None = None,
        meta: Mapping[str, Any] | None = None,
        sample_every: int = 100,
        every_rank: bool = False,
    ) -> None:
        self.path: Path | None = None
        self.sample_every = sample_every
        self._every_rank = every_rank
        self.quiet = quiet
        self._wanted = Path(path)
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
        self._at_end: AtExit | None = None
        self._before_end: Callable[[], None] | None = None
        self._blamed: tuple[str, ...] = ()
        self._early: list[tuple[str, dict[str, Any]]] = []

    def bind(
        self,
        *,
        policy: AnyPolicy | None = None,
        names: Callable[[], Sequence[str]] | None = None,
        process: FindProcess | None = None,
    ) -> None:
        """Fill in the arguments that were not given, before the first step.

        A scaler calls it: it knows its policy, its model and its framework.
        """
        self._policy = policy if self._policy is None else self._policy
        self._names = names if self._names is None else self._names
        self._process = process if self._process is None else self._process

    def begin(self) -> bool:
        """Make the file, if this process is to write one; return whether it does.

        Raises:
            StateError: It cannot be made, or is there already.
        """
        if not self.begun:
            self.begun = True
            process = (self._process or process_from_environment)()
            if os.getpid() == self._pid and not process.worker:
                try:
                    self._open(process)
                except StateError as error:
                    if self._failed is None:
                        raise
                    self._failed(error)
        return self.writer is not None

    def _open(self, process: Process) -> None:
        # Asked once, and let go of: they may hold the scaler that holds this.
        asked, self._names = self._names, None
        rank = process.rank if self._rank is None else self._rank
        if rank != 0 and not self._every_rank:
            return
        names = [] if asked is None else list(asked())
        about = {"policy": _described(self._policy), "parameters": names}
        place = process._replace(rank=rank)
        self.writer = self._made_writer(place, {**about, **self._meta})
        self.path = self.writer.path
        assert self.path is not None
        if self._made is not None:
            self._made(self.path)
        for code, facts in self._early:
            self.writer.event(code, **facts)
        # After the writer's own, so that it is called before it.
        self._at_end = AtExit(self._drain)

    def _made_writer(self, process: Process, meta: dict[str, Any]) -> RunWriter:
        """Return the writer of the first file whose name is free."""
        path, number = self._wanted, 1
        while True:
            try:
                return RunWriter(
                    path,
                    meta=meta,
                    resume=self._resume,
                    rank=process.rank,
                    world_size=process.world_size,
                    every_rank=self._every_rank,
                    sample_every=self.sample_every,
                )
            except StateError as error:
                if not self._numbered or error.code != "GS305":
                    raise
            number += 1
            name = f"{self._wanted.stem}.{number}{self._wanted.suffix}"
            path = self._wanted.with_name(name)

    def before_end(self, drain: Callable[[], None]) -> None:
        """Call this before the file is closed, to hand over what is on its way."""
        self._before_end = drain

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
            judgement: What the judge made of them.
            culprits: The names of the tensors that were not finite.
            peaks: The largest scaled magnitude of each tensor, if something happened
                or the step is sampled. Not to be changed afterwards.
        """
        self.row(record, judgement.verdict)
        self.details(record, judgement, culprits, peaks)

    def row(self, record: StepRecord, verdict: Verdict) -> None:
        """Record the row of a step, as `see` does."""
        if not self.begun:
            self.begin()
        if self.writer is not None:
            self.writer.step(
                record.step,
                record.scale,
                record.applied,
                verdict.value,
                record.grad_norm,
                record.amax if record.read else None,
                record.loss,
            )

    def details(
        self,
        record: StepRecord,
        judgement: Judgement,
        culprits: Sequence[str] = (),
        peaks: Mapping[str, float] | None = None,
    ) -> None:
        """Record what else there is to a step whose row was recorded, as `see` does."""
        writer = self.writer
        if writer is None:
            return
        step, verdict = record.step, judgement.verdict.value
        for finding in judgement.findings:
            where = finding.where or None
            writer.event(finding.code, step=step, where=where, data=finding.as_dict())
        if culprits and tuple(culprits) != self._blamed:
            # The same ones again say nothing new, and would fill the file.
            self._blamed = tuple(culprits)
            named = {"culprits": self._blamed[:MOST_NAMES], "count": len(culprits)}
            writer.event(verdict, step=step, where=culprits[0], data=named)
        if peaks:
            writer.peaks(step, peaks)

    def sample(self, step: int, samples: Mapping[str, TensorSample]) -> None:
        """Record what the underflow meter counted at a step, by tensor."""
        if self.writer is not None:
            self.writer.samples(step, samples)

    def event(self, code: str, **facts: Any) -> None:
        """Record something that happened outside of the judge.

        What comes before the first step is kept until there is a file.
        """
        if self.writer is not None:
            self.writer.event(code, **facts)
        elif not self.begun:
            self._early.append((code, facts))

    def close(self, end: str = "closed") -> None:
        """Write what is left; a second call does nothing."""
        self._drain()
        if self._at_end is not None:
            self._at_end.cancel()
            self._at_end = None
        if self.writer is not None:
            self.writer.close(end)
            self.writer = None

    def let_go(self) -> None:
        """Close the file, in whatever thread the collector happens to run."""
        if threading.current_thread().name == THREAD:
            # It would wait for itself.
            threading.Thread(target=self.close, name="gradscale-close").start()
        else:
            self.close()

    def _drain(self) -> None:
        drain, self._before_end = self._before_end, None
        if drain is not None and os.getpid() == self._pid:
            drain()


def _described(policy: AnyPolicy | None) -> dict[str, Any] | None:
    if policy is None:
        return None
    return {"kind": type(policy).__name__, **asdict(policy)}
