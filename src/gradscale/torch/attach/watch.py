"""Records a scaler of another library without changing it."""

import functools
import math
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.errors import ConfigError
from gradscale.judge.judge import Judge
from gradscale.recording.recorder import Recorder
from gradscale.torch.device_state.host_copy import LAG, LateRow, Mailbox
from gradscale.torch.device_state.layout import (
    RING,
    Facts,
    Ledger,
    new_ledger,
    record_of,
)
from gradscale.torch.devices import host_may_act, moved
from gradscale.torch.grads.gathered import Gradients
from gradscale.torch.grads.read_plain import read_on_device, read_on_host
from gradscale.torch.grads.stats import largest
from gradscale.torch.looks.plain import numbers
from gradscale.torch.monitor.model_lookup import ModelLookup
from gradscale.torch.monitor.process import process_here
from gradscale.torch.names import apart, names_of
from gradscale.torch.scaler import GradScaler
from gradscale.torch.scaling import trace_of
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
        model: Names the culprits by the model's parameter names.
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
    record.bind(process=process_here)
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
        self._rows = _LateRows(recorder)
        self._ledger: Ledger | None = None
        self._peaks: dict[int, GradientPeaks] = {}
        self._traces: list[Tensor] = []
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
        if host_may_act():
            self._trace(outputs)
        return self._methods["scale"](outputs)

    def _trace(self, outputs: Any) -> None:
        """Keep the losses and whether they are finite; a generator is not consumed."""
        if isinstance(outputs, Tensor):
            trace = trace_of(outputs)
            if trace is not None:
                self._traces.append(trace)
            if outputs.numel() == 1 and outputs.is_floating_point():
                self._losses.append(outputs.detach().reshape(()))
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._trace(output)

    def _on_unscale(self, optimizer: Any) -> Any:
        self._read(optimizer)
        return self._methods["unscale_"](optimizer)

    def _on_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._read(optimizer)
        return self._methods["step"](optimizer, *args, **kwargs)

    def _read(self, optimizer: Any) -> None:
        """Read the gradients, before they are unscaled."""
        if id(optimizer) in self._peaks or not host_may_act():
            return
        states = self._scaler._per_optimizer_states
        state = states.get(id(optimizer))
        if state is None or state["stage"] is OptState.READY:
            model: Any = self._model
            if model is None:
                model = self._lookup.of_optimizer(optimizer)
            self._peaks[id(optimizer)] = read_peaks(optimizer, model)
            meter, scale = self._rows.meter, self._scaler._scale
            if meter.wanted and scale is not None:
                meter.sample(_gradients_of(optimizer), scale, (model, optimizer))

    def _on_load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._methods["load_state_dict"](*args, **kwargs)
        # The loaded scale was calibrated before.
        self._resumed = True
        if self._ledger is not None:
            self._ledger.fields.uncalibrated.zero_()
        return returned

    def _on_update(self, *args: Any, **kwargs: Any) -> Any:
        facts = self._facts() if host_may_act() else None
        returned = self._methods["update"](*args, **kwargs)
        if facts is not None:
            self._note(facts)
        return returned

    @torch.no_grad()
    def _facts(self) -> Facts | None:
        """Return the row that this update acts on; None if no optimizer was read."""
        scale = self._scaler._scale
        states = list(self._scaler._per_optimizer_states.values())
        flags = [flag for s in states for flag in s["found_inf_per_device"].values()]
        if scale is None or not flags:
            return None
        if self._ledger is None:
            self._ledger = new_ledger(scale.device, 1.0)
            self._ledger.fields.uncalibrated.fill_(float(not self._resumed))
        home, ledger = scale.device, self._ledger
        for trace in self._traces:
            ledger.fields.loss_trace.add_(moved(trace, home))
        found = largest([moved(flag.reshape(()), home) for flag in flags]).clamp(
            0.0, 1.0
        )
        stepped = any(state["stage"] is OptState.STEPPED for state in states)
        peaks = [p.peak for p in self._peaks.values() if p.peak is not None]
        return Facts(
            read=ledger.one,
            stepped=ledger.one if stepped else ledger.zero,
            skipped=found if stepped else ledger.zero,
            # A copy: the update writes into the same tensor.
            scale=scale.float().reshape(()).clone(),
            found=found,
            norm_found=ledger.zero,
            amax=largest([moved(p.float(), home) for p in peaks] or [ledger.zero]),
            grad_norm=ledger.unasked,
        )

    @torch.no_grad()
    def _note(self, facts: Facts) -> None:
        """Write the row of this update and record the rows that have arrived."""
        ledger = self._ledger
        assert ledger is not None
        # Not a sum: the trace is NaN where a loss was not finite.
        row = torch.stack([*facts, *ledger.fields])
        ledger.ring[self._updates % RING].copy_(row)
        self._updates += 1
        ledger.total.tally[0].add_(1)
        ledger.fields.loss_trace.zero_()
        ledger.fields.uncalibrated.mul_(facts.found)
        raised = self._scaler._scale.reshape(()) > facts.scale
        ledger.fields.grown.copy_(raised)
        peaks = functools.partial(named_peaks, list(self._peaks.values()))
        losses = [moved(loss, ledger.loss.device) for loss in self._losses]
        if losses:
            ledger.loss.copy_(torch.stack([loss.float() for loss in losses]).sum())
        self._peaks, self._traces, self._losses = {}, [], []
        recorder = self._rows.recorder
        if not recorder.begun:
            recorder.begin()
            recorder.before_end(functools.partial(self._rows.drain, ledger))
        self._rows.push(ledger, peaks, has_loss=bool(losses))


# Returns the peaks of one step by name. Called for a skipped step only; may sync.
NamedPeaks = Callable[[], Mapping[str, float]]


class _LateRows:
    """Judges and records rows as they arrive on the host. Prints nothing.

    Holds no reference to the scaler, so that it can outlive it.

    Args:
        recorder: Writes the run file.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.meter = Meter(recorder.sample_every)
        self._judge = Judge()
        self._mailbox = Mailbox()
        # The newest is of this update, the oldest of the update now due.
        self._peaks: deque[NamedPeaks | None] = deque(maxlen=LAG + 1)

    def push(
        self, ledger: Ledger, peaks: NamedPeaks | None, *, has_loss: bool = False
    ) -> None:
        """End an update: send its row, and record the rows that are due.

        Args:
            ledger: Holds the row.
            peaks: Returns the peaks of this update.
            has_loss: The ledger's loss is that of this update.
        """
        late = self._mailbox.exchange(ledger, has_loss=has_loss)
        sample = self.meter.end_step()
        self._peaks.append(peaks)
        if not late:
            return
        for one in late[:-1]:
            self._record(one, None, None)
        own = self._peaks[0] if len(self._peaks) > LAG else None
        self._record(late[-1], own, sample)

    def drain(self, ledger: Ledger) -> None:
        """Record the rows that have not arrived yet. Waits for them."""
        for _ in range(LAG):
            self.push(ledger, None)

    def _record(
        self, late: LateRow, peaks: NamedPeaks | None, sample: UnderflowSample | None
    ) -> None:
        record = record_of(late.row, late.step, late.loss)
        if sample is not None:
            record = record._replace(lost=sample.lost)
        finite = record.finite and record.norm_finite and record.read
        named = {} if finite or peaks is None else peaks()
        culprits = [name for name, peak in named.items() if not math.isfinite(peak)]
        # A peak is NaN if any element is, and infinite only if none is NaN.
        if any(math.isnan(peak) for peak in named.values()):
            record = record._replace(nan=True)
        judgement = self._judge.see(record, culprits)
        self.recorder.see(record, judgement, culprits, named)
        if sample is not None:
            self.recorder.sample(record.step, sample.rows())


@dataclass
class GradientPeaks:
    """The largest magnitudes of one optimizer's gradients.

    Attributes:
        peak: float[], of all gradients, NaN if any element is; None without gradients.
        groups: For each device and dtype, the parameters and a function that returns
            float[n], their peaks; None where all are far from overflow.
        sources: Modules and optimizers that name the parameters.
    """

    peak: Tensor | None
    groups: list[tuple[list[Tensor], Callable[[], Tensor] | None]]
    sources: tuple[Any, ...]

    def named(self) -> dict[str, float]:
        """Return the largest magnitude of each gradient by name. Syncs."""
        return {
            name: peak
            for params, peaks in self.groups
            if peaks is not None
            for name, peak in zip(
                names_of(params, self.sources), peaks().tolist(), strict=True
            )
        }


@torch.no_grad()
def read_peaks(optimizer: Any, model: Any = None) -> GradientPeaks:
    """Read the gradients of an optimizer once; write nothing. No host sync.

    Args:
        optimizer: Owns the parameters.
        model: Names the parameters.
    """
    grouped: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(
        lambda: ([], [])
    )
    for param, values in _values_of(optimizer):
        params, tensors = grouped[values.device, values.dtype]
        params.append(param)
        tensors.append(values)
    groups, peaks = [], []
    for (device, _), (params, tensors) in grouped.items():
        read = read_on_host if device.type == "cpu" else read_on_device
        peak, each, _ = read(tensors, None)
        groups.append((params, each))
        peaks.append(peak)
    return GradientPeaks(_max_of(peaks), groups, (model, optimizer))


def named_peaks(read: Iterable[GradientPeaks]) -> dict[str, float]:
    """Return the largest magnitude of each gradient of all optimizers. Syncs."""
    peaks: dict[str, float] = {}
    for each in read:
        own = each.named()
        peaks.update(zip(apart(own, set(peaks)), own.values(), strict=True))
    return peaks


def _gradients_of(optimizer: Any) -> Gradients:
    """Return the gradients of this rank, for reading only."""
    pairs = _values_of(optimizer)
    return Gradients(
        params=[param for param, _ in pairs],
        tensors=[values for _, values in pairs],
        addresses=numbers([]),
        versions=numbers([]),
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


def _max_of(peaks: list[Tensor]) -> Tensor | None:
    if len(peaks) < 2:
        return peaks[0] if peaks else None
    home = peaks[0].device
    return torch.stack([p.float().to(home, non_blocking=True) for p in peaks]).amax()


def _wrapped(method: Callable[..., Any], wrapper: Callable[..., Any]) -> Any:
    """Return a function that calls `wrapper` and has the metadata of `method`."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(*args, **kwargs)

    return wrapped
