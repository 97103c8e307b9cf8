"""Records a JAX run in a run file, from the host or from inside `jit`."""

import functools
import math
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradscale.core.checkpoint import AnyPolicy
from gradscale.core.records import StepRecord
from gradscale.errors import ConfigError, OrderError
from gradscale.jax.culprits import check_names
from gradscale.jax.last_step import Counts, LastStep, unpacked
from gradscale.jax.names import leaf_names
from gradscale.jax.state import only_state
from gradscale.recording import recorder as runs
from gradscale.recording.process import Process
from gradscale.recording.recorded_run import RecordedRun, Sink


class _Pending(NamedTuple):
    """A step whose arrays are on their way to the host.

    Attributes:
        step: Its facts.
        loss: float[] or None.
        names: The names of the leaves; empty if unknown.
    """

    step: LastStep
    loss: Any
    names: tuple[str, ...]


class Recorder:
    """Judges the steps of a run, writes them to a run file and prints findings.

    The file is that of `gradscale.torch`: `gradscale report`, `doctor` and `tail` read
    it. Call `step` once an update, or `record_step` inside the compiled step.

    One process writes: process 0 of `jax.distributed`, so construct it after
    `jax.distributed.initialize()`. Updates are identified by their number: an update
    passed twice, as between two updates of `MultiSteps`, is recorded once.

    The file is created by the constructor. A name that is taken gets a number:
    run.2.gs, run.3.gs and so on. A later failure of the file or of a sink is reported
    once and never raised.

    >>> import optax, tempfile
    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import current_scale, last, loss_scaled
    >>> from gradscale.runfile import open_run
    >>> folder = tempfile.TemporaryDirectory()
    >>> policy = DynamicScale()
    >>> optimizer = loss_scaled(optax.sgd(0.1), policy)
    >>> params = {"head": jnp.ones(2), "tail": jnp.ones(2)}
    >>> state = optimizer.init(params)
    >>> bad = {"head": jnp.ones(2) / 0.0, "tail": jnp.ones(2)}
    >>> with Recorder(folder.name + "/run.gs", policy=policy) as recorder:
    ...     for grads in (params, bad, params):
    ...         scale = current_scale(state)
    ...         scaled = {name: grad * scale for name, grad in grads.items()}
    ...         _, state = optimizer.update(scaled, state, params)
    ...         recorder.step(last(state), params=params, loss=0.5)
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     [(row.step, row.scale, row.verdict) for row in run.steps()]
    ...     [(event.step, event.where) for event in run.events()]
    [(1, 65536.0, 'GS000'), (2, 65536.0, 'GS002'), (3, 32768.0, 'GS000')]
    [(2, 'head')]
    >>> folder.cleanup()

    Args:
        path: The run file; by convention it ends in .gs. None to write none.
        policy: The policy of `loss_scaled`, for the reports.
        sinks: Each receives every step; see `gradscale.sinks`.
        resume: Continue an existing file. Nothing that is recorded is erased: if the
            steps go back, new rows replace the repeated ones, and the file as it was is
            kept under the next free number.
        quiet: Write findings and do not print them.
        meta: Further facts about the run for the file, JSON values.
        sample_every: Interval, in steps, at which the peaks of each leaf are kept.

    Raises:
        StateError: The folder does not exist or is not writable (GS308), or the file
            cannot be continued (GS306, GS307).

    Attributes:
        path: The run file; None if this process writes none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        policy: AnyPolicy | None = None,
        sinks: Iterable[Sink] = (),
        resume: bool = False,
        quiet: bool = False,
        meta: Mapping[str, Any] | None = None,
        sample_every: int = 100,
    ) -> None:
        self._file: runs.Recorder | None = None
        if path is not None:
            self._file = runs.Recorder(
                path,
                policy=policy,
                resume=resume,
                quiet=quiet,
                meta=meta,
                sample_every=sample_every,
                process=_process,
            )
        self._run = RecordedRun(
            recorder=self._file,
            sinks=sinks,
            quiet=quiet,
            process=_process,
            versions={"jax": jax.__version__},
        )
        # Callbacks run in threads of XLA.
        self._lock = threading.Lock()
        self._names: tuple[str, ...] = ()
        self._pending: _Pending | None = None
        self._previous: tuple[bytes, ...] = ()
        self._run.begin()
        if self._file is not None:
            self._file.before_end(self._drain)

    @property
    def path(self) -> Path | None:
        """The run file; None if this process writes none."""
        return None if self._file is None else self._file.path

    def step(
        self, last_step: LastStep, *, params: Any = None, loss: Any = None
    ) -> None:
        """Record one update. Waits for the update before it, never for this one.

        The arrays are copied to the host asynchronously, and read by the next call or
        by `close`. They must stay valid until then: those of `last` do, even if the
        state is donated to the next step.

        Args:
            last_step: `last(opt_state)`, after the update. Eager `last` dispatches one
                small computation; to save it, return `last(opt_state)` from the
                compiled step.
            params: The tree that `init()` was called with; its paths name the leaves.
                Only the structure is read. Without it no culprit is named.
            loss: float[], the loss before it was scaled.

        Raises:
            OrderError: Called inside `jit`.
            StateError: The step is that of an ensemble.
            ConfigError: `params` is another tree, or the loss is not a scalar.
        """
        if isinstance(last_step.step, jax.core.Tracer):
            raise OrderError(
                "Recorder.step() was called inside jit. The values of the step are not "
                "known while it is traced. Call record_step(recorder, opt_state, ...) "
                "inside jit, or step() with the state that the compiled step returned.",
                code="GS102",
            )
        last_step.check_single()
        _check_loss(loss)
        names = self._names_of(params, last_step.peaks.size)
        for array in jax.tree.leaves((last_step, loss)):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()
        due, self._pending = self._pending, _Pending(last_step, loss, names)
        self._record(due)

    def close(self, end: str = "closed", **facts: object) -> None:
        """Record the steps in flight and close the file; a second call does nothing.

        Waits for the callbacks of `record_step`.

        Args:
            end: The end state, in a word.
            facts: Further facts about the end, JSON values.
        """
        try:
            self._drain()
        finally:
            self._run.close(end, **facts)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self.close("error", error=error.__name__)

    def _drain(self) -> None:
        """Record all steps in flight."""
        jax.effects_barrier()
        due, self._pending = self._pending, None
        self._record(due)

    def _receive(
        self, names: tuple[str, ...], facts: Any, counts: Any, loss: Any
    ) -> None:
        """Record one update from inside `jit`; the arguments are on the host."""
        # No JAX computation here: it could wait for the computation of the callback.
        step = unpacked(np.asarray(facts), Counts(*np.asarray(counts)))
        self._record(_Pending(step, loss, names))

    def _record(self, pending: _Pending | None) -> None:
        if pending is None:
            return
        step, loss = jax.device_get((pending.step, pending.loss))
        # An accumulating MultiSteps repeats the last update; under shard_map every
        # device reports the same one.
        key = tuple(np.asarray(fact).tobytes() for fact in step)
        record = step.record
        if loss is not None:
            finite = record.loss_finite and math.isfinite(loss)
            record = record._replace(loss=float(loss), loss_finite=finite)
        with self._lock:
            if record.step == 0 or key == self._previous:
                return
            self._previous = key
            self._run.judge.tensors = step.peaks.size
            culprits, peaks = self._leaves(record, step.peaks, pending.names)
            self._run.record_step(record, culprits, peaks)

    def _leaves(
        self, record: StepRecord, peaks: np.ndarray, names: tuple[str, ...]
    ) -> tuple[list[str], dict[str, float] | None]:
        """Return the culprits of a step, and the peaks if they are to be kept."""
        writer = None if self._file is None else self._file.writer
        healthy = record.finite and record.norm_finite
        if not names or (healthy and not (writer and writer.due(record.step))):
            return [], None
        named = dict(zip(names, peaks.tolist(), strict=True))
        return [name for name, peak in named.items() if not math.isfinite(peak)], named

    def _names_of(self, params: Any, leaves: int) -> tuple[str, ...]:
        """Return the names of the leaves; read from the first `params` given."""
        if params is not None and not self._names:
            names = leaf_names(params)
            check_names(names, leaves)
            self._names = tuple(names)
            if self._file is not None and self._file.writer is not None:
                self._file.writer.set_meta(parameters=names)
        if self._names:
            check_names(self._names, leaves)
        return self._names


def record_step(
    recorder: Recorder, opt_state: Any, *, params: Any = None, loss: Any = None
) -> None:
    """Record the last update from inside `jit`, `lax.scan` included.

    Adds a `jax.debug.callback` to the compiled step: the step's facts, 9 + n floats
    for n leaves, are copied to the host, and a thread of XLA records them. The host
    does not wait, but JAX dispatches a function with a callback more slowly, and on a
    GPU the callback waits for the kernels before it. With one device the calls are
    ordered. With several, the callback runs once under `jit`, and once a device under
    `shard_map`, where the copies are recorded once. Do not use it under `vmap`: the
    members of an ensemble have no common step.

    >>> import optax
    >>> from gradscale import DynamicScale
    >>> from gradscale.jax import loss_scaled, scaled_value_and_grad
    >>> from gradscale.sinks import CallableSink
    >>> optimizer = loss_scaled(optax.sgd(0.1), DynamicScale())
    >>> sink = CallableSink(lambda step, figures: print(step, figures["scale_log2"]))
    >>> recorder = Recorder(None, sinks=[sink])
    >>> @jax.jit
    ... def train_step(params, opt_state):
    ...     grad = scaled_value_and_grad(lambda params: (params**2).sum())
    ...     loss, grads = grad(opt_state, params)
    ...     updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    ...     record_step(recorder, opt_state, params=params, loss=loss)
    ...     return optax.apply_updates(params, updates), opt_state
    >>> params = jnp.ones(2)
    >>> opt_state = optimizer.init(params)
    >>> with recorder:
    ...     for _ in range(2):
    ...         params, opt_state = train_step(params, opt_state)
    1 16.0
    2 16.0

    Args:
        recorder: Receives the update.
        opt_state: The state that `update` returned.
        params: As for `Recorder.step`.
        loss: float[], the loss before it was scaled.

    Raises:
        StateError: There is no `loss_scaled` in the state, more than one, or that of
            an ensemble.
        ConfigError: `params` is another tree, or the loss is not a scalar.
    """
    state = only_state(opt_state)
    state.last.check_single()
    _check_loss(loss)
    names = recorder._names_of(params, state.last.peaks.size)
    jax.debug.callback(
        functools.partial(recorder._receive, names),
        jnp.asarray(state.facts),
        jnp.asarray(state.counts),
        loss,
        # JAX refuses ordered callbacks in a computation on several devices.
        ordered=jax.device_count() == 1,
    )


def _check_loss(loss: Any) -> None:
    if loss is not None and jnp.ndim(loss) != 0:
        raise ConfigError(
            f"loss has shape {jnp.shape(loss)}. A step is recorded with one loss. Pass "
            "the scalar that was differentiated, or its mean.",
            code="GS101",
        )


def _process() -> Process:
    return Process(jax.process_index(), jax.process_count())
