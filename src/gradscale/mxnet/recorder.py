"""Records an MXNet run in a run file."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import mxnet

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.records import StepRecord
from gradscale.errors import check_choice
from gradscale.mxnet.gradients import Reading
from gradscale.recording import recorder as runs
from gradscale.recording.process import Process, process_from_environment
from gradscale.recording.recorded_run import RecordedRun, Sink


class Recorder:
    """Judges the steps of a run, writes them to a run file and prints findings.

    The file is that of `gradscale.torch`: `gradscale report`, `doctor` and `tail` read
    it. Pass it to `amp.init_loss_scaling` or to `FP16Trainer`, one for each. With a
    distributed key-value store, worker 0 writes.

    >>> import mxnet as mx, tempfile
    >>> from gradscale.mxnet import amp
    >>> from gradscale.runfile import open_run
    >>> folder = tempfile.TemporaryDirectory()
    >>> weight = mx.gluon.Parameter("weight", shape=(1,), init="ones")
    >>> weight.initialize()
    >>> trainer = mx.gluon.Trainer([weight], "sgd")
    >>> with Recorder(folder.name + "/run.gs", quiet=True) as recorder:
    ...     scaler = amp.init_loss_scaling(trainer, recorder=recorder)
    ...     for factor in (1.0, float("inf"), 1.0):
    ...         with mx.autograd.record():
    ...             loss = weight.data() * factor
    ...             with amp.scale_loss(loss, trainer) as scaled:
    ...                 scaled.backward()
    ...         trainer.step(1)
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     [(row.step, row.scale, row.verdict) for row in run.steps()]
    [(1, 65536.0, 'GS000'), (2, 65536.0, 'GS203'), (3, 32768.0, 'GS000')]
    >>> folder.cleanup()

    Args:
        path: The run file; by convention it ends in .gs. A name that is taken gets a
            number: run.2.gs. None to write none.
        sinks: Each receives every step; see `gradscale.sinks`.
        guard: "raise" ends a run that no scale can help; "report" only reports it.
        resume: Continue an existing file.
        quiet: Write findings and do not print them.
        meta: Further facts about the run for the file, JSON values.
        sample_every: Interval, in steps, at which peaks are kept.

    Raises:
        StateError: The folder does not exist or is not writable (GS308), or the file
            cannot be continued (GS306, GS307).
        ConfigError: `guard` is unknown.

    Attributes:
        path: The run file; None if this process writes none, or before the first step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        sinks: Iterable[Sink] = (),
        guard: Literal["report", "raise"] = "report",
        resume: bool = False,
        quiet: bool = False,
        meta: Mapping[str, Any] | None = None,
        sample_every: int = 100,
    ) -> None:
        check_choice("guard", guard, ("report", "raise"))
        self._trainer: Any = None
        self._file: runs.Recorder | None = None
        if path is not None:
            self._file = runs.Recorder(
                path,
                resume=resume,
                quiet=quiet,
                meta={"mxnet": mxnet.__version__, **(meta or {})},
                sample_every=sample_every,
                process=self._process,
            )
        self._run = RecordedRun(
            recorder=self._file,
            sinks=sinks,
            guard=guard,
            quiet=quiet,
            process=self._process,
            versions={"mxnet": mxnet.__version__},
            raised_elsewhere=("GS202",),
        )

    @property
    def path(self) -> Path | None:
        """The run file; None if this process writes none, or before the first step."""
        return None if self._file is None else self._file.path

    def bind(self, trainer: Any) -> None:
        """Take the rank of this process from the key-value store of a trainer."""
        self._trainer = trainer

    def add(
        self,
        record: StepRecord,
        reading: Reading,
        policy: Any,
        state: Callable[[], Mapping[str, Any]],
    ) -> str:
        """Record one step; return the text of its collapse, if there is one.

        Args:
            record: Its facts.
            reading: The gradients of the step.
            policy: The policy in use.
            state: Returns the scaler's state, for the bundle of a run that is stopped.

        Raises:
            HopelessRun: No scale can help, and `guard` is "raise".
        """
        self._begin(reading, policy)
        writer = None if self._file is None else self._file.writer
        kept = not record.finite or (writer is not None and writer.due(record.step))
        peaks = reading.by_name() if kept else None
        self._run.record_step(record, reading.culprits, peaks, state=state)
        if self._run.hopeless is not None:
            raise self._run.hopeless
        return self._run.raised_text

    def close(self, end: str = "closed", **facts: object) -> None:
        """Close the file; a second call does nothing.

        Args:
            end: The end state, in a word.
            facts: Further facts about the end, JSON values.
        """
        self._run.close(end, **facts)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self.close("error", error=error.__name__)

    def _begin(self, reading: Reading, policy: AnyPolicy) -> None:
        """Create the file before the first row."""
        self._run.judge.tensors = len(reading.names)
        if self._file is not None and not self._file.begun:
            self._file.bind(policy=policy, names=lambda: reading.names)
            self._run.begin()

    def _process(self) -> Process:
        store = None if self._trainer is None else self._trainer._kvstore
        if store is None or "dist" not in store.type:
            return process_from_environment()
        return Process(store.rank, store.num_workers)
