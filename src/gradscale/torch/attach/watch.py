"""Records a scaler of another library without changing it."""

import functools
import math
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.errors import ConfigError
from gradscale.judge.judge import Judge
from gradscale.recording.recorder import Recorder
from gradscale.torch.device_state.async_copy import LAG, PERIOD, HostRow, RowCopies
from gradscale.torch.device_state.layout import (
    RING,
    DeviceState,
    StepFacts,
    new_device_state,
)
from gradscale.torch.device_state.loss_stats import note_loss_
from gradscale.torch.devices import can_touch_host, outside_inference_mode, to_device
from gradscale.torch.grads.stats import GradStats, largest, read
from gradscale.torch.monitor.model_lookup import ModelLookup
from gradscale.torch.monitor.recorder import process_here
from gradscale.torch.names import apart, names_of
from gradscale.torch.scaler import GradScaler
from gradscale.torch.tensor_list import GradSnapshot, numbers
from gradscale.torch.underflow.meter import Meter
from gradscale.torch.underflow.sample import UnderflowSample

_WRAPPED = ("scale", "unscale_", "step", "update", "load_state_dict")


def watch(
    scaler: Any,
    model: torch.nn.Module | None = None,
    *,
    record: str | os.PathLike[str] | Recorder,
) -> "Watch":
    """Record a scaler that you cannot replace: Accelerate's, Lightning's, FSDP's.

    Scales, steps and weights stay the same bit for bit, and no host sync is added. The
    cost is one more read of the gradients per update.

    >>> import tempfile
    >>> from gradscale.runfile import open_run
    >>> folder = tempfile.TemporaryDirectory()
    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    >>> with watch(scaler, net, record=folder.name + "/run.gs"):
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         scaler.scale(net(torch.full((1, 2), 4.0)).sum()).backward()
    ...         scaler.step(optimizer)
    ...         scaler.update()
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     [(row.step, row.applied) for row in run.steps()]
    ...     run.peaks(1)["weight"]
    [(1, False), (2, False), (3, True)]
    inf
    >>> folder.cleanup()

    Args:
        scaler: A `torch.amp.GradScaler` or an instance of a subclass, or an object
            with one as its attribute `scaler`: Accelerate's `Accelerator`, Lightning's
            precision plugin.
        model: Its parameter names identify the culprits.
        record: The run file to write; rank 0 writes it.

    Returns:
        A handle; `detach()`, or the end of a `with` block, ends the recording.
    """
    watched = getattr(scaler, "scaler", scaler)
    if isinstance(watched, GradScaler):
        raise ConfigError(
            "watch() was given a gradscale scaler. It records more by itself than "
            "watch() can observe from outside. Pass record= to the scaler.",
            code="GS101",
        )
    if not isinstance(watched, torch.amp.GradScaler):
        raise ConfigError(
            f"watch() was given a {type(watched).__name__}. It can only record a "
            "torch.amp.GradScaler, a subclass of it, or an object with one as its "
            "attribute scaler. Pass the scaler itself.",
            code="GS101",
        )
    if not isinstance(record, Recorder):
        record = Recorder(record, meta=described(watched))
    record.bind(process=process_here, framework="torch")
    return Watch(watched, model, record)


def described(scaler: Any) -> dict[str, Any]:
    """Return the `meta` entries of a foreign scaler. No host sync."""
    kind = type(scaler)
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    settings = {name: getattr(scaler, f"_{name}", None) for name in names}
    return {
        "policy": {"kind": "DynamicScale", **settings},
        "watched": f"{kind.__module__}.{kind.__qualname__}",
    }


class Watch:
    """Wraps the methods of one scaler and records its steps.

    The methods are wrapped on the instance; its class and other instances are not
    changed.

    Args:
        scaler: The scaler.
        model: Names the culprits.
        recorder: Writes the run file.
    """

    def __init__(
        self, scaler: Any, model: torch.nn.Module | None, recorder: Recorder
    ) -> None:
        self._scaler = scaler
        self._model = model
        self._lookup = ModelLookup()
        self._rows = _RowRecorder(recorder)
        self._state: DeviceState | None = None
        # By optimizer: the statistics of its gradients, and the sources of their names.
        self._stats: dict[int, NamedStats] = {}
        self._losses: list[Tensor] = []
        self._resumed = False
        self._updates = 0
        self._methods: dict[str, Callable[..., Any]] = {}
        if scaler.is_enabled():
            self._attach()

    def detach(self) -> None:
        """Unwrap the scaler's methods and close the file."""
        for name in self._methods:
            vars(self._scaler).pop(name, None)
        vars(self._scaler).pop("__getstate__", None)
        self._methods = {}
        self._rows.recorder.close()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _attach(self) -> None:
        scaler = self._scaler
        for name in _WRAPPED:
            self._methods[name] = getattr(scaler, name)
            wrapper = getattr(self, f"_on_{name.rstrip('_')}")
            setattr(scaler, name, _wrapped(self._methods[name], wrapper))
        original_state = scaler.__getstate__

        def state() -> dict[str, Any]:
            # Copies of the scaler and its pickles are not watched.
            ours = {*_WRAPPED, "__getstate__"}
            return {k: v for k, v in original_state().items() if k not in ours}

        scaler.__getstate__ = state
        # At the end of the process the recorder closes its file itself.
        recorder = self._rows.recorder
        weakref.finalize(scaler, recorder.let_go).atexit = False

    def _on_scale(self, outputs: Any) -> Any:
        if can_touch_host():
            self._trace(outputs)
        return self._methods["scale"](outputs)

    def _trace(self, outputs: Any) -> None:
        """Keep the losses until the update; a generator is not consumed."""
        if isinstance(outputs, Tensor):
            self._losses.append(outputs.detach())
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._trace(output)

    def _on_unscale(self, optimizer: Any) -> Any:
        self._read(optimizer)
        return self._methods["unscale_"](optimizer)

    def _on_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._read(optimizer)
        return self._methods["step"](optimizer, *args, **kwargs)

    @outside_inference_mode()
    def _read(self, optimizer: Any) -> None:
        """Read the gradients, before they are unscaled."""
        scale = self._scaler._scale
        if id(optimizer) in self._stats or scale is None or not can_touch_host():
            return
        states = self._scaler._per_optimizer_states
        state = states.get(id(optimizer))
        if state is None or state["stage"] is OptState.READY:
            model: Any = self._model
            if model is None:
                model = self._lookup.of_optimizer(optimizer)
            gradients, sources = _gradients_of(optimizer), (model, optimizer)
            if gradients.tensors:
                stats = read(gradients, scale.device)
                self._stats[id(optimizer)] = stats, sources
            if self._rows.meter.wanted:
                self._rows.meter.sample(gradients, scale, sources)

    def _on_load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._methods["load_state_dict"](*args, **kwargs)
        # The loaded scale was calibrated before.
        self._resumed = True
        if self._state is not None:
            self._state.fields.uncalibrated.zero_()
        return returned

    def _on_update(self, *args: Any, **kwargs: Any) -> Any:
        facts = self._facts() if can_touch_host() else None
        returned = self._methods["update"](*args, **kwargs)
        if facts is not None:
            self._note(facts)
        return returned

    @outside_inference_mode()
    def _facts(self) -> StepFacts | None:
        """Return the facts that this update acts on; None if no gradient was read."""
        scale = self._scaler._scale
        states = list(self._scaler._per_optimizer_states.values())
        flags = [flag for s in states for flag in s["found_inf_per_device"].values()]
        if scale is None or not flags:
            return None
        if self._state is None:
            self._state = new_device_state(scale.device, 1.0)
            self._state.fields.uncalibrated.fill_(float(not self._resumed))
        home, state = scale.device, self._state
        first = True
        for loss in self._losses:
            first = not note_loss_(loss, state.one, state, first=first) and first
        nonfinite = largest([to_device(flag.reshape(()), home) for flag in flags])
        nonfinite = nonfinite.clamp(0.0, 1.0)
        stepped = any(entry["stage"] is OptState.STEPPED for entry in states)
        peaks = [stats.amax() for stats, _ in self._stats.values()]
        return StepFacts(
            read=state.one,
            stepped=state.one if stepped else state.zero,
            skipped=nonfinite if stepped else state.zero,
            # A copy: the update writes into the same tensor.
            scale=scale.float().reshape(()).clone(),
            nonfinite=nonfinite,
            norm_unusable=state.zero,
            amax=largest(peaks or [state.zero]),
            grad_norm=state.unasked,
        )

    @outside_inference_mode()
    def _note(self, facts: StepFacts) -> None:
        """Write the row of this update and record the rows that have arrived."""
        state = self._state
        assert state is not None
        fields = state.fields
        state.ring[self._updates % RING].copy_(torch.stack([*facts, *fields]))
        self._updates += 1
        state.total.counts[0].add_(1)
        fields.loss_trace.zero_()
        fields.loss.copy_(state.nan)
        fields.uncalibrated.mul_(facts.nonfinite)
        fields.grown.copy_(self._scaler._scale.reshape(()) > facts.scale)
        stats = list(self._stats.values())
        self._stats, self._losses = {}, []
        recorder = self._rows.recorder
        if not recorder.begun:
            recorder.begin()
            recorder.trains(sources[-1] for _, sources in stats)
            recorder.before_end(functools.partial(self._rows.drain, state))
        recorder.begin_update()
        self._rows.end_update(state, stats)


# The statistics of one optimizer's gradients, and the sources of their names.
NamedStats = tuple[GradStats, tuple[Any, ...]]


class _RowRecorder:
    """Judges and records rows as they arrive on the host. Prints nothing.

    Holds no reference to the scaler, so that it can outlive it.

    Args:
        recorder: Writes the run file.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.meter = Meter(recorder.sample_every)
        self._judge = Judge(framework="torch")
        self._copies = RowCopies()
        self._stats: deque[list[NamedStats]] = deque(maxlen=LAG + PERIOD)
        self._samples: dict[int, UnderflowSample] = {}

    def end_update(self, state: DeviceState, stats: list[NamedStats]) -> None:
        """End an update: record the rows that are due.

        Args:
            state: Holds the row.
            stats: The statistics of this update.
        """
        self._stats.append(stats)
        sample = self.meter.end_step()
        if sample is not None:
            self._samples[sample.step] = sample
        self._record(self._copies.advance(state))

    def drain(self, state: DeviceState) -> None:
        """Record the rows that have not arrived yet. Waits for them."""
        self._samples.update((sample.step, sample) for sample in self.meter.finish())
        self._record(self._copies.drain(state))

    def _record(self, rows: list[HostRow]) -> None:
        for row in rows:
            record, update = row.record, row.update
            sample = None if update is None else self._samples.pop(update, None)
            if sample is not None:
                lost, layer = sample.lost_and_layer()
                record = record._replace(lost=lost, lost_layer=layer)
            finite = record.finite and record.norm_finite and record.read
            named: dict[str, float] = {}
            if not finite and update is not None:
                age = self._copies.updates - update
                if age < len(self._stats):
                    named = named_peaks(self._stats[-1 - age])
            culprits = [name for name, peak in named.items() if not math.isfinite(peak)]
            # A peak is NaN if any element is, and infinite only if none is NaN.
            if any(math.isnan(peak) for peak in named.values()):
                record = record._replace(nan=True)
            record = self.recorder.numbered(record)
            judgement = self._judge.see(record, culprits)
            self.recorder.see(record, judgement, culprits, named)
            if sample is not None:
                self.recorder.sample(record.step, sample.rows())


def named_peaks(read: Iterable[NamedStats]) -> dict[str, float]:
    """Return the largest magnitude of each gradient of all optimizers. Syncs."""
    peaks: dict[str, float] = {}
    for stats, sources in read:
        for kind in stats.kinds:
            if kind.peaks is not None:
                params = [stats.params[i] for i in kind.positions]
                names = apart(names_of(params, sources), set(peaks))
                peaks.update(zip(names, kind.peaks.tolist(), strict=True))
    return peaks


def _gradients_of(optimizer: Any) -> GradSnapshot:
    """Return the gradients of this rank, for reading only."""
    pairs = _values_of(optimizer)
    return GradSnapshot(
        params=[param for param, _ in pairs],
        tensors=[values for _, values in pairs],
        addresses=numbers([]),
        versions=numbers([]),
        numels=numbers(values.numel() for _, values in pairs),
        kind=None,
        present=len(pairs),
    )


def _values_of(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters with gradients, and the gradients' elements.

    Dense and real; of this rank only. Empty gradients are left out.
    """
    pairs = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                local = getattr(param.grad, "_local_tensor", param.grad).detach()
                if local.is_sparse:
                    local = local._values()
                values = torch.view_as_real(local) if local.is_complex() else local
                if values.numel():
                    pairs.append((param, values))
    return pairs


def _wrapped(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Any:
    """Return a function that calls `wrapper` and has the metadata of `method`."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return wrapped
