"""Recording a scaler that is not ours, without changing anything about it."""

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from gradscale.errors import ConfigError
from gradscale.recording.recorder import Recorder
from gradscale.torch.attach.chronicle import Chronicle
from gradscale.torch.attach.peeking import Peek, named_peaks, peek, values_of
from gradscale.torch.device_state.host_copy import LAG, Mailbox
from gradscale.torch.device_state.layout import RING, Facts, Ledger, new_ledger
from gradscale.torch.devices import host_may_act, moved
from gradscale.torch.grads.stats import largest
from gradscale.torch.monitor.model_lookup import ModelLookup
from gradscale.torch.monitor.process import process_here
from gradscale.torch.scaler import GradScaler
from gradscale.torch.scaling import trace_of
from gradscale.torch.underflow.meter import Meter

_WATCHED = ("scale", "unscale_", "step", "update", "load_state_dict")


def watch(
    scaler: Any,
    model: torch.nn.Module | None = None,
    *,
    record: str | os.PathLike[str] | Recorder,
) -> "Watch":
    """Record what a scaler does: torch's own, Accelerate's, Lightning's, FSDP's.

    Nothing is changed: the same scales, the same steps, the same weights bit for bit,
    and no host sync. Each update costs one more read of the gradients.

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
        scaler: A `torch.amp.GradScaler`, an object of a class derived from it, or what
            has one under the name `scaler`: Accelerate's `Accelerator`, Lightning's
            precision plugin.
        model: Names the culprits by the model's parameter names.
        record: The run file to write; rank 0 writes it.

    Returns:
        What ends the watching: `detach()`, or the end of a `with` block.
    """
    watched = getattr(scaler, "scaler", scaler)
    if isinstance(watched, GradScaler):
        raise ConfigError(
            "watch() was given a scaler of gradscale's own. It sees more by itself "
            "than could be seen from outside. Pass record= to the scaler.",
            code="GS101",
        )
    if not isinstance(watched, torch.amp.GradScaler):
        raise ConfigError(
            f"watch() was given a {type(watched).__name__}. Only what derives from "
            "torch.amp.GradScaler, or has one as its attribute scaler, can be watched. "
            "Pass the scaler itself.",
            code="GS101",
        )
    if not isinstance(record, Recorder):
        record = Recorder(record, meta=described(watched))
    record.bind(process=process_here)
    return Watch(watched, model, record)


def described(scaler: Any) -> dict[str, Any]:
    """Return what `meta` says of a foreign scaler. No host sync."""
    kind = type(scaler)
    moves = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    settings = {name: getattr(scaler, f"_{name}", None) for name in moves}
    return {
        "policy": {"kind": "DynamicScale", **settings},
        "watched": f"{kind.__module__}.{kind.__qualname__}",
    }


class Watch:
    """Sees the calls of one scaler's methods, and takes facts beside them.

    The methods are wrapped on the object alone; its class and all other objects of it
    stay as they are.

    Args:
        scaler: The scaler.
        model: Names the culprits.
        recorder: Where the facts go.
    """

    def __init__(
        self, scaler: Any, model: torch.nn.Module | None, recorder: Recorder
    ) -> None:
        self._scaler = scaler
        self._model = model
        self._lookup = ModelLookup()
        self._meter = Meter(recorder.sample_every)
        self._chronicle = Chronicle(recorder)
        self._mailbox = Mailbox()
        self._ledger: Ledger | None = None
        self._peeks: dict[int, Peek] = {}
        self._traces: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._resumed = False
        self._updates = 0
        self._methods: dict[str, Callable[..., Any]] = {}
        if scaler.is_enabled():
            self._attach()

    def detach(self) -> None:
        """Leave the scaler as it was, and close the file."""
        for name in self._methods:
            vars(self._scaler).pop(name, None)
        vars(self._scaler).pop("__getstate__", None)
        self._methods = {}
        self._chronicle.recorder.close()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _attach(self) -> None:
        scaler = self._scaler
        for name in _WATCHED:
            self._methods[name] = getattr(scaler, name)
            seen = getattr(self, f"_saw_{name.rstrip('_')}")
            setattr(scaler, name, _standing_for(self._methods[name], seen))
        kept_state = scaler.__getstate__

        def state() -> dict[str, Any]:
            # A copy of the scaler is not watched, and a file holds none of us.
            ours = {*_WATCHED, "__getstate__"}
            return {k: v for k, v in kept_state().items() if k not in ours}

        scaler.__getstate__ = state
        # At the end of the process the recorder closes its file itself.
        recorder = self._chronicle.recorder
        weakref.finalize(scaler, recorder.let_go).atexit = False

    def _saw_scale(self, outputs: Any) -> Any:
        if host_may_act():
            self._trace(outputs)
        return self._methods["scale"](outputs)

    def _trace(self, outputs: Any) -> None:
        """Note whether the losses are finite; a generator is left alone."""
        if isinstance(outputs, Tensor):
            trace = trace_of(outputs)
            if trace is not None:
                self._traces.append(trace)
            if outputs.numel() == 1 and outputs.is_floating_point():
                self._losses.append(outputs.detach().reshape(()))
        elif isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._trace(output)

    def _saw_unscale(self, optimizer: Any) -> Any:
        self._look(optimizer)
        return self._methods["unscale_"](optimizer)

    def _saw_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self._look(optimizer)
        return self._methods["step"](optimizer, *args, **kwargs)

    def _look(self, optimizer: Any) -> None:
        """Look at the gradients while they are as backward left them."""
        if id(optimizer) in self._peeks or not host_may_act():
            return
        states = self._scaler._per_optimizer_states
        state = states.get(id(optimizer))
        if state is None or state["stage"] is OptState.READY:
            model: Any = self._model
            if model is None:
                model = self._lookup.of_optimizer(optimizer)
            self._peeks[id(optimizer)] = peek(optimizer, model)
            if self._meter.wanted and self._scaler._scale is not None:
                self._sample(optimizer, model)

    def _sample(self, optimizer: Any, model: Any) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        scale = self._scaler._scale
        self._meter.sample(values_of(params), scale, (model, optimizer))

    def _saw_load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._methods["load_state_dict"](*args, **kwargs)
        # Its scale has fitted before.
        self._resumed = True
        if self._ledger is not None:
            self._ledger.fields.uncalibrated.zero_()
        return returned

    def _saw_update(self, *args: Any, **kwargs: Any) -> Any:
        facts = self._facts() if host_may_act() else None
        returned = self._methods["update"](*args, **kwargs)
        if facts is not None:
            self._note(facts)
        return returned

    @torch.no_grad()
    def _facts(self) -> Facts | None:
        """Return what this update is about to act on; None if there is nothing."""
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
        peaks = [p.peak for p in self._peeks.values() if p.peak is not None]
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
        """Write the row of this update, and see those that have arrived."""
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
        peeks = list(self._peeks.values())
        losses = [moved(loss, ledger.loss.device) for loss in self._losses]
        if losses:
            ledger.loss.copy_(torch.stack([loss.float() for loss in losses]).sum())
        self._peeks, self._traces, self._losses = {}, [], []
        recorder = self._chronicle.recorder
        if not recorder.begun:
            recorder.begin()
            parts = self._chronicle, self._mailbox, ledger, self._meter
            recorder.before_end(functools.partial(_drain, *parts))
        late = self._mailbox.exchange(ledger, has_loss=bool(losses))
        named = functools.partial(named_peaks, peeks)
        self._chronicle.see(late, named, self._meter.end_step())


def _standing_for(method: Callable[..., Any], seen: Callable[..., Any]) -> Any:
    """Return a function that is called as `seen` and looks like `method`."""

    @functools.wraps(method)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return seen(*args, **kwargs)

    return stand_in


def _drain(
    chronicle: Chronicle, mailbox: Mailbox, ledger: Ledger, meter: Meter
) -> None:
    """Hand over the rows on their way; no scaler is held for it."""
    for _ in range(LAG):
        chronicle.see(mailbox.exchange(ledger), None, meter.end_step())
