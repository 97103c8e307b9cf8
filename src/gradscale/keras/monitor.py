"""A Keras callback that records a run: scale, skipped steps, culprits, findings."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
from keras import ops

from gradscale.core.records import StepRecord
from gradscale.errors import ConfigError
from gradscale.keras.last_step import culprits_of, peaks_of, record_of
from gradscale.keras.optimizer import LossScaleOptimizer
from gradscale.recording.process import Process, process_from_environment
from gradscale.recording.recorded_run import RecordedRun, Sink
from gradscale.recording.recorder import Recorder


class Monitor(keras.callbacks.Callback):
    """Records the steps of `fit`, adds the scale to its logs and prints findings.

    The progress bar, the history and later callbacks get two entries: `scale`, the one
    of the last step, and `skipped`, the steps skipped so far. The file is that of
    `gradscale.torch`: `gradscale report`, `doctor` and `tail` read it.

    There is a row for each execution: with `steps_per_execution` above 1, one for that
    many steps, with the facts of the last of them; the counts are exact.

    Keras gives a callback the mean loss of the epoch so far; the loss in the file is
    the mean since the row before, from the metric `loss`. A mean that is not finite
    would hide the losses of the later steps: Monitor resets the metric then, and logs
    the non-finite mean until the end of the epoch. A custom `train_step` that does not
    update the metric should return the loss of the step as `loss`.

    >>> import keras, numpy, tempfile
    >>> from gradscale.keras import LossScaleOptimizer
    >>> from gradscale.runfile import open_run
    >>> folder = tempfile.TemporaryDirectory()
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    >>> monitor = Monitor(record=folder.name + "/run.gs")
    >>> ones = numpy.ones((4, 2), "float32")
    >>> history = model.fit(
    ...     ones, ones[:, :1], batch_size=2, verbose=0, callbacks=[monitor]
    ... )
    >>> history.history["scale"], history.history["skipped"]
    ([32768.0], [0])
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     [(row.step, row.scale, row.verdict) for row in run.steps()]
    [(1, 32768.0, 'GS000'), (2, 32768.0, 'GS000')]
    >>> folder.cleanup()

    Args:
        record: The run file; by convention it ends in .gs. None to write none.
        sinks: Each receives every step; see `gradscale.sinks`.
        resume: Continue an existing file. A further `fit` with the same callback
            always continues its file.
        guard: "raise" ends the run with `HopelessRun` once no scale can help; "report"
            prints it.
        quiet: Print nothing; findings are written.
        meta: Further facts about the run for the file, JSON values.
        sample_every: Interval, in steps, at which the peaks of variables are kept.

    Raises:
        StateError: The folder does not exist or is not writable (GS308), or the file
            cannot be continued (GS306, GS307).

    Attributes:
        path: The run file; None before the first step and if this process writes none.
    """

    def __init__(
        self,
        record: str | os.PathLike[str] | None = None,
        *,
        sinks: Iterable[Sink] = (),
        resume: bool = False,
        guard: Literal["report", "raise"] = "report",
        quiet: bool = False,
        meta: Mapping[str, Any] | None = None,
        sample_every: int = 100,
    ) -> None:
        super().__init__()
        self._record = record
        self._meta = dict(meta or {})
        self._sample_every = sample_every
        self._quiet = quiet
        self._file = self._open(resume)
        self._settings: dict[str, Any] = {
            "sinks": list(sinks),
            "guard": guard,
            "quiet": quiet,
            "process": _process,
            "versions": {"keras": keras.version()},
        }
        self._run = RecordedRun(recorder=self._file, **self._settings)
        self._closed = False
        self._step = 0
        # Of the epoch so far: batches; total and weight of their losses, as the metric
        # has them; the first mean that was not finite.
        self._batches = 0
        self._loss_sum = (0.0, 0.0)
        self._nonfinite: float | None = None

    @property
    def path(self) -> Path | None:
        """The run file; None before the first step."""
        return None if self._file is None else self._file.path

    def step(self, optimizer: LossScaleOptimizer, loss: Any = None) -> StepRecord:
        """Record the last step of an optimizer; for training loops without `fit`.

        Waits for the step. Not inside a compiled function.

        Args:
            optimizer: The optimizer, after `apply`.
            loss: float[], the loss before it was scaled; None if it is not known.

        Raises:
            ConfigError: The optimizer is not that of gradscale.
            HopelessRun: No scale can help, and `guard` is "raise".
        """
        counts, facts = _checked(optimizer)._facts().values()
        known = None if loss is None else float(ops.convert_to_numpy(loss))
        finite = known is None or math.isfinite(known)
        return self._see(optimizer, counts, facts, known, finite)

    def close(self, end: str = "closed", **facts: object) -> None:
        """Close the run file; called at the end of `fit`.

        Args:
            end: The end state, in a word.
            facts: Further facts about the end, JSON values.
        """
        self._closed = True
        self._run.close(end, **facts)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self.close("error", error=error.__name__)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the optimizer; continue the file of an earlier `fit`."""
        optimizer = _checked(self.model.optimizer)
        if self._closed:
            self._file = self._open(resume=True)
            self._run = RecordedRun(recorder=self._file, **self._settings)
            self._closed = False
        if self._file is not None:
            self._file.bind(policy=optimizer.policy, process=_process)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Expect a new mean of the loss."""
        self._batches = 0
        self._loss_sum = (0.0, 0.0)
        self._nonfinite = None

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Record the step and add to the logs."""
        optimizer = _checked(self.model.optimizer)
        counts, facts = self._values(
            optimizer._facts().variables, optimizer.variables, "optimizer_variables"
        )
        single = batch == self._batches
        self._batches = batch + 1
        loss = self._step_loss((logs or {}).get("loss"))
        finite = loss is None or math.isfinite(loss)
        if not finite:
            # Of several steps, another one may have had that loss.
            finite = not single and record_of(counts, facts).finite
        record = self._see(optimizer, counts, facts, loss, finite)
        self._log(logs, record, counts)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add to the logs."""
        optimizer = _checked(self.model.optimizer)
        counts, facts = optimizer._facts().values()
        self._log(logs, record_of(counts, facts), counts)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the run file."""
        self.close()

    def _values(
        self, variables: Sequence[Any], all_variables: Sequence[Any], kind: str
    ) -> list[Any]:
        """Return the values of some variables after the last step.

        Args:
            variables: Some of `all_variables`.
            all_variables: All of one kind.
            kind: Their name in the state of a JAX model.
        """
        state = getattr(self.model, "_jax_state", None)
        if state is None:
            return [ops.copy(variable.value) for variable in variables]
        # While JAX trains, the variables are empty and the values are here. A full
        # synchronization would assign every variable of the model.
        places = {id(variable): i for i, variable in enumerate(all_variables)}
        return [state[kind][places[id(variable)]] for variable in variables]

    def _step_loss(self, mean: float | None) -> float | None:
        """Return the mean loss of the steps since the last call.

        Args:
            mean: The entry `loss` of the logs.
        """
        metrics = [metric for metric in self.model.metrics if metric.name == "loss"]
        if mean is None or not metrics:
            return mean
        metric = metrics[0]
        values = self._values(
            [metric.total, metric.count],
            self.model.metrics_variables,
            "metrics_variables",
        )
        total, weight = (float(ops.convert_to_numpy(value)) for value in values)
        earlier, covered = self._loss_sum
        if weight == covered:
            # A custom train_step does not update it.
            return mean
        self._loss_sum = (total, weight)
        if math.isfinite(total):
            return (total - earlier) / (weight - covered)
        if self._nonfinite is None:
            self._nonfinite = mean
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        metric.reset_state()
        self._loss_sum = (0.0, 0.0)
        return total

    def _log(
        self, logs: dict[str, Any] | None, record: StepRecord, counts: Any
    ) -> None:
        if logs is None:
            return
        logs["scale"] = record.scale
        logs["skipped"] = int(ops.convert_to_numpy(counts)[1])
        if self._nonfinite is not None:
            logs["loss"] = self._nonfinite

    def _see(
        self,
        optimizer: LossScaleOptimizer,
        counts: Any,
        facts: Any,
        loss: float | None,
        loss_finite: bool,
    ) -> StepRecord:
        record = record_of(counts, facts)._replace(loss=loss, loss_finite=loss_finite)
        if record.step == self._step:
            return record
        self._step = record.step
        names = optimizer.variable_names
        self._begin(optimizer, names)
        writer = None if self._file is None else self._file.writer
        peaks = None
        culprits: tuple[str, ...] = ()
        if not record.finite or (writer is not None and writer.due(record.step)):
            peaks = peaks_of(facts, names)
            culprits = culprits_of(peaks)
        self._run.record_step(
            record, culprits, peaks, state=lambda: {"scale": optimizer.scale}
        )
        if self._run.hopeless is not None:
            raise self._run.hopeless
        return record

    def _begin(self, optimizer: LossScaleOptimizer, names: list[str]) -> None:
        """Create the file before the first row."""
        self._run.judge.tensors = len(names)
        if self._file is not None and not self._file.begun:
            self._file.bind(policy=optimizer.policy, names=lambda: names)
            self._run.begin()

    def _open(self, resume: bool) -> Recorder | None:
        if self._record is None:
            return None
        return Recorder(
            self._record,
            process=_process,
            resume=resume,
            quiet=self._quiet,
            meta={"keras": keras.version(), "backend": keras.backend.backend()}
            | self._meta,
            sample_every=self._sample_every,
        )


def _checked(optimizer: Any) -> LossScaleOptimizer:
    if not isinstance(optimizer, LossScaleOptimizer):
        raise ConfigError(
            f"The optimizer is a {type(optimizer).__name__}. Monitor reads the outcome "
            "of a step from gradscale.keras.LossScaleOptimizer. Compile with "
            "gradscale.keras.compile(model, optimizer, ...), or pass "
            "gradscale.keras.LossScaleOptimizer(optimizer) to model.compile().",
            code="GS101",
        )
    return optimizer


def _process() -> Process:
    """Return the rank of this process, also that of TensorFlow's TF_CONFIG."""
    try:
        config = json.loads(os.environ.get("TF_CONFIG", ""))
    except ValueError:
        return process_from_environment()
    task, cluster = config.get("task", {}), config.get("cluster", {})
    workers = len(cluster.get("chief", [])) + len(cluster.get("worker", []))
    if task.get("type") == "chief":
        return Process(0, workers)
    rank = int(task.get("index", 0)) + len(cluster.get("chief", []))
    return Process(rank, max(workers, 1))
