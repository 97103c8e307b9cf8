"""Patches torch's GradScaler classes so that unmodified scripts are recorded.

No name is replaced: torch's classes stay the same objects, wherever they were imported
from. Only their `__new__` changes: it returns an instance of a gradscale class that is
also a subclass of torch's. A subclass that a library has defined keeps its own methods,
and its instances are recorded by `watch`.
"""

import functools
import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradscale.core.checkpoint import AnyPolicy, torch_settings
from gradscale.core.policies import DynamicScale
from gradscale.errors import ConfigError, GradscaleError, GradscaleWarning
from gradscale.recording.recorder import Recorder
from gradscale.recording.shared_recorder import SharedFiles, SharedRecorder
from gradscale.torch import messages
from gradscale.torch.attach.watch import described, watch
from gradscale.torch.checkpoint import SETTINGS, chosen
from gradscale.torch.cpu.amp import GradScaler as CpuGradScaler
from gradscale.torch.cuda.amp import GradScaler as CudaGradScaler
from gradscale.torch.monitor.recorder import process_here
from gradscale.torch.names import names_of
from gradscale.torch.scaler import GradScaler
from gradscale.torch.sharded import ShardedGradScaler
from gradscale.torch.step.dispatch import unscales_itself

# The gradscale class for each torch class, by module and name: torch's FSDP module is
# not imported here.
SUBSTITUTES: dict[tuple[str, str], type[GradScaler]] = {
    ("torch.amp.grad_scaler", "GradScaler"): GradScaler,
    ("torch.cuda.amp.grad_scaler", "GradScaler"): CudaGradScaler,
    ("torch.cpu.amp.grad_scaler", "GradScaler"): CpuGradScaler,
    (
        "torch.distributed.fsdp.sharded_grad_scaler",
        "ShardedGradScaler",
    ): ShardedGradScaler,
    **{
        (ours.__module__, "GradScaler"): ours
        for ours in (GradScaler, CudaGradScaler, CpuGradScaler)
    },
    (ShardedGradScaler.__module__, "ShardedGradScaler"): ShardedGradScaler,
}


# The largest interval of the rule, which counts in i32.
MAX_INTERVAL = 2**31 - 1


class Session(NamedTuple):
    """Settings that `gradscale run` passes to the processes it starts.

    Attributes:
        file: The run file.
        notes: A file of JSON lines in which each process reports its scalers.
        files: The run files of this process.
    """

    file: str
    notes: str
    files: SharedFiles

    def note(self, **fields: object) -> None:
        """Append a line to the notes in one write."""
        line = json.dumps(fields) + "\n"
        # `gradscale run` has ended before this process and removed the file, or the
        # disk is full.
        with suppress(OSError):
            descriptor = os.open(self.notes, os.O_WRONLY | os.O_APPEND)
            with os.fdopen(descriptor, "ab", buffering=0) as notes:
                notes.write(line.encode())

    def note_file(self, path: object) -> None:
        """Append the path of a run file that was created."""
        self.note(file=str(path))


class Recorded(GradScaler):
    """A scaler that records itself; `_recorded` creates its subclasses.

    As a substitute for a torch class, it accepts all values that torch's setters and
    checkpoints accept.
    """

    stands_for: ClassVar[type]
    session: ClassVar[Session]
    # A substitute for a torch class must not raise where torch does not.
    replaces_torch: ClassVar[bool]
    # The growth interval as set, if the rule cannot count to it.
    _odd_interval: int | None = None

    def _begin(self) -> None:
        if self._record is None:
            self._record = recorder_of(
                self.session, policy=self._policy, names=self._parameter_names
            )
        super()._begin()
        self._monitor.raises_at_floor = not self.replaces_torch
        self.session.note(made=type(self).__name__, enabled=self._enabled)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        if self._state is not None:
            # At the first loss, so that a run without an update is recorded too.
            self._monitor.begin(self, self._state)

    def _recorder(self) -> Recorder | None:
        recorder = super()._recorder()
        if recorder is not None:
            # The script may write a run file of its own.
            recorder.bind(made=self.session.note_file)
        return recorder

    def _make_warnings(self) -> messages.WarnOnce:
        if not isinstance(self._record, Recorder):
            return messages.WarnOnce()
        # Warnings that torch would not print go into the file.
        return _RecordedWarnings(self._record, self.replaces_torch)

    def _parameter_names(self) -> list[str]:
        steps = [s for s in self._iteration.settled.values() if s.owner() is not None]
        return [n for step in steps for n in names_of(step.params(), step.name_sources)]

    def _set_move(self, **setting: Any) -> None:
        try:
            super()._set_move(**setting)
            odd = None
        except ConfigError:
            if not self.replaces_torch:
                raise
            odd = _odd(setting.get("growth_interval", 1))
            if odd is not None:
                # Torch's rule compares for equality: the scale never grows.
                setting["growth_interval"] = MAX_INTERVAL
            policy = self._policy
            fixed = not isinstance(policy, DynamicScale)
            kept = moves_of(policy) if fixed else asdict(policy)
            self._policy = DynamicScale.unchecked(**{**kept, **setting})
        if "growth_interval" in setting:
            self._odd_interval = odd

    # As in the base class, but without clipping to the rule's range.
    _growth_interval = property(
        lambda self: (
            moves_of(self._policy)["growth_interval"]
            if self._odd_interval is None
            else self._odd_interval
        ),
        lambda self, value: self._set_move(growth_interval=value),
    )

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the growth interval as it was set."""
        state = super().state_dict()
        return {**state, "growth_interval": self._growth_interval} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with all settings that torch's scaler takes."""
        if self._enabled and self.replaces_torch and "scale" in state_dict:
            scale = self._clipped(state_dict["scale"])
            if isinstance(scale, Tensor) and scale.numel() == 1:
                scale = float(scale)
            state_dict = {**state_dict, "scale": scale}
        moves = {name: state_dict[name] for name in SETTINGS[1:] if name in state_dict}
        try:
            DynamicScale(**moves)
        except ConfigError:
            if not self.replaces_torch:
                raise
            super().load_state_dict({**state_dict, **moves_of(DynamicScale())})
            for name, value in moves.items():
                self._set_move(**{name: value})
        else:
            super().load_state_dict(state_dict)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the step; raise as torch does if no gradient was read."""
        states = self._per_optimizer_states.values()
        read = any(state["found_inf_per_device"] for state in states)
        waits = self._scale is not None and new_scale is None and not read
        if self._enabled and self.replaces_torch:
            if waits:
                raise messages.nothing_to_update()
            new_scale = self._clipped(new_scale)
        super().update(new_scale)

    def _clipped(self, scale: Any) -> Any:
        """Clip a scale to the bounds of the policy, which torch does not have.

        NaN gives the current scale. Values that torch refuses, and tensors on a
        device, are returned unchanged.
        """
        value = scale
        if isinstance(value, Tensor) and value.device.type == "cpu":
            value = value.item() if value.numel() == 1 else None
        low, high = self._policy.min_scale, self._policy.max_scale
        if not isinstance(value, float) or low <= value <= high:
            return scale
        self._warn.clipped_scale(value, self._policy)
        return self.get_scale() if math.isnan(value) else min(max(value, low), high)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_policy" in state:
            super().__setstate__(state)
            return
        # A pickle or a copy of torch's own scaler remains torch's.
        session, self.__class__ = self.session, self.stands_for
        self.__dict__.update(state)
        _watch(self, session)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle would resolve the name of this class to torch's own class.
        return _unpickled, (self.stands_for,), self.__getstate__()


class _RecordedWarnings(messages.WarnOnce):
    """Writes warnings into the run file instead of issuing them."""

    def __init__(self, recorder: Recorder, replaces_torch: bool) -> None:
        super().__init__()
        self._recorder = recorder
        self._replaces_torch = replaces_torch

    def no_gradients(self, optimizer: Any) -> None:
        raises = self._replaces_torch and not unscales_itself(optimizer)
        if raises:
            # So that the warning is in the file when the script ends.
            self._recorder.begin()
        super().no_gradients(optimizer)
        if raises:
            # Torch's scaler raises here.
            raise AssertionError("No inf checks were recorded for this optimizer.")

    def float16_params(self, message: str) -> None:
        """Do nothing: the finding of the same code is recorded."""

    def _warn(self, key: object, message: str, code: str) -> None:
        if key not in self._issued:
            self._issued.add(key)
            self._recorder.event(code, data={"what": message})


def install(environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Patch torch's GradScaler classes so that new instances record themselves.

    Args:
        environment: Holds the variables that `gradscale run` sets.

    Returns:
        A function that removes the patch and closes the run files.
    """
    session = Session(
        environment["GRADSCALE_RUN_FILE"],
        environment["GRADSCALE_RUN_NOTES"],
        SharedFiles(),
    )
    base = torch.amp.GradScaler
    original_init = base.__init__
    made: dict[type, type] = {}

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        ours = SUBSTITUTES.get((cls.__module__, cls.__qualname__))
        if ours is None or not _accepts(cls, args, kwargs):
            return object.__new__(cls)
        if cls not in made:
            # One class for all threads.
            made.setdefault(cls, _recorded(ours, cls, session))
        return object.__new__(made[cls])

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Not reached by gradscale's classes: they do not call it.
        original_init(self, *args, **kwargs)
        _watch(self, session)

    # inspect.signature(GradScaler) shows torch's arguments.
    new.__signature__ = inspect.signature(original_init)  # type: ignore[attr-defined]
    base.__new__ = new  # type: ignore[method-assign]
    base.__init__ = init  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", category=GradscaleWarning)

    def undo() -> None:
        base.__init__ = original_init  # type: ignore[method-assign]
        base.__new__ = _plain_new  # type: ignore[method-assign]
        session.files.close()

    return undo


def _watch(scaler: Any, session: Session) -> None:
    """Record a scaler that stays torch's or another library's."""
    session.note(made=type(scaler).__name__, enabled=scaler._enabled)
    if scaler._enabled:
        watch(scaler, record=recorder_of(session, meta=described(scaler)))


def moves_of(policy: AnyPolicy) -> dict[str, Any]:
    """Return the settings of a policy that torch's setters change, by name."""
    return dict(zip(SETTINGS[1:], torch_settings(policy), strict=True))


def _odd(interval: Any) -> int | None:
    """Return the growth interval if it is an integer out of range, else None."""
    whole = isinstance(interval, int) and not isinstance(interval, bool)
    return interval if whole and not 1 <= interval <= MAX_INTERVAL else None


def _accepts(theirs: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether gradscale's scaler accepts the settings given for torch's.

    Torch also takes a growth interval of 0, or a tensor as the initial scale: such a
    scaler stays torch's and is recorded by `watch`.
    """
    if issubclass(theirs, GradScaler):
        return True
    try:
        given = inspect.signature(theirs.__init__).bind(None, *args, **kwargs)
        given.apply_defaults()
        chosen(None, tuple(given.arguments[name] for name in SETTINGS))
    except ConfigError:
        return False
    except TypeError:
        # Wrong arguments: the constructor raises.
        return True
    return True


def _unpickled(theirs: Any) -> GradScaler:
    """Return an empty scaler for a pickled one, recorded if the patch is active."""
    made = theirs.__new__(theirs)
    if isinstance(made, GradScaler):
        return made
    return object.__new__(SUBSTITUTES[theirs.__module__, theirs.__qualname__])


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    # `__new__` cannot be deleted once set: object.__new__ would then refuse the
    # arguments.
    return object.__new__(cls)


def _recorded(ours: type[GradScaler], theirs: type, session: Session) -> type:
    """Return a subclass of `ours` and `theirs` with the name of `theirs`."""
    bases = (Recorded, ours) if issubclass(ours, theirs) else (Recorded, ours, theirs)
    return type(
        theirs.__name__,
        bases,
        {
            "__module__": theirs.__module__,
            "__qualname__": theirs.__qualname__,
            "__doc__": theirs.__doc__,
            "stands_for": theirs,
            "session": session,
            "replaces_torch": not issubclass(theirs, GradScaler),
        },
    )


def recorder_of(session: Session, **settings: Any) -> Recorder:
    """Return a recorder that writes into the run file of this process.

    Args:
        session: The settings of `gradscale run`.
        settings: Further arguments of `SharedRecorder`.
    """

    def failed(error: GradscaleError | GradscaleWarning) -> None:
        session.note(failed=str(error))

    return SharedRecorder(
        session.files,
        session.file,
        quiet=True,
        made=session.note_file,
        failed=failed,
        process=process_here,
        **settings,
    )
