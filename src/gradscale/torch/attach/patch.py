"""Patches torch's GradScaler classes so that unmodified scripts are recorded.

No name is replaced: torch's classes stay the same objects, wherever they were imported
from. Only their `__new__` changes: it returns an instance of a gradscale class that is
also a subclass of torch's. A subclass that a library has defined keeps its own methods,
and its instances are recorded by `watch`.
"""

import functools
import inspect
import json
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from gradscale.errors import GradscaleError, GradscaleWarning
from gradscale.recording.recorder import Recorder
from gradscale.torch.attach.watch import described, watch
from gradscale.torch.cpu.amp import GradScaler as CpuGradScaler
from gradscale.torch.cuda.amp import GradScaler as CudaGradScaler
from gradscale.torch.messages import WarnOnce
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


class Session(NamedTuple):
    """Settings that `gradscale run` passes to the processes it starts.

    Attributes:
        file: The run file.
        notes: A file of JSON lines in which each process reports its scalers.
    """

    file: str
    notes: str

    def note(self, **fields: object) -> None:
        """Append a line to the notes in one write."""
        line = json.dumps(fields) + "\n"
        try:
            descriptor = os.open(self.notes, os.O_WRONLY | os.O_APPEND)
        except OSError:
            # `gradscale run` has ended before this process and removed the file.
            return
        with os.fdopen(descriptor, "ab", buffering=0) as notes:
            notes.write(line.encode())


class Recorded(GradScaler):
    """A scaler that records itself; `_recorded` creates its subclasses."""

    stands_for: ClassVar[type]
    session: ClassVar[Session]

    def _begin(self) -> None:
        if self._record is None:
            self._record = _recorder(
                self.session, policy=self._policy, names=self._parameter_names
            )
        elif not isinstance(self._record, Recorder):
            # The script has asked for a run file of its own.
            self.session.note(file=os.path.abspath(self._record))
        super()._begin()
        self.session.note(made=type(self).__name__, enabled=self._enabled)

    def _make_warnings(self) -> WarnOnce:
        if not isinstance(self._record, Recorder):
            return WarnOnce()
        # Warnings that torch would not print go into the file.
        return _RecordedWarnings(self._record, self.stands_for)

    def _parameter_names(self) -> list[str]:
        steps = [s for s in self._iteration.settled.values() if s.owner() is not None]
        return [n for step in steps for n in names_of(step.params(), step.name_sources)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle would resolve the name of this class to torch's own class.
        return _unpickled, (self.stands_for,), self.__getstate__()


class _RecordedWarnings(WarnOnce):
    """Writes warnings into the run file instead of issuing them."""

    def __init__(self, recorder: Recorder, stands_for: type) -> None:
        super().__init__()
        self._recorder = recorder
        self._replaces_torch = not issubclass(stands_for, GradScaler)

    def no_gradients(self, optimizer: Any) -> None:
        raises = self._replaces_torch and not unscales_itself(optimizer)
        if raises:
            # So that the warning is in the file when the script ends.
            self._recorder.begin()
        super().no_gradients(optimizer)
        if raises:
            # Torch's scaler raises here.
            raise AssertionError("No inf checks were recorded for this optimizer.")

    def _warn(self, key: object, message: str, code: str, *, stacklevel: int) -> None:
        if key not in self._issued:
            self._issued.add(key)
            self._recorder.event(code, data={"what": message})


def install(environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Patch torch's GradScaler classes so that new instances record themselves.

    Args:
        environment: Holds the variables that `gradscale run` sets.

    Returns:
        A function that removes the patch; existing instances stay recorded.
    """
    session = Session(
        environment["GRADSCALE_RUN_FILE"], environment["GRADSCALE_RUN_NOTES"]
    )
    base = torch.amp.GradScaler
    original_init = base.__init__
    made: dict[type, type] = {}

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls not in made:
            ours = SUBSTITUTES.get((cls.__module__, cls.__qualname__))
            made[cls] = cls if ours is None else _recorded(ours, cls, session)
        return object.__new__(made[cls])

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Reached by subclasses of other libraries only: gradscale's do not call it.
        original_init(self, *args, **kwargs)
        session.note(made=type(self).__name__, enabled=self._enabled)
        if self._enabled:
            watch(self, record=_recorder(session, meta=described(self)))

    # inspect.signature(GradScaler) shows torch's arguments.
    new.__signature__ = inspect.signature(original_init)  # type: ignore[attr-defined]
    base.__new__ = new  # type: ignore[method-assign]
    base.__init__ = init  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", category=GradscaleWarning)

    def undo() -> None:
        base.__init__ = original_init  # type: ignore[method-assign]
        base.__new__ = _plain_new  # type: ignore[method-assign]

    return undo


def _unpickled(theirs: Any) -> GradScaler:
    """Return an empty scaler for a pickled one, recorded if the patch is active."""
    made = theirs.__new__(theirs)
    if isinstance(made, GradScaler):
        return made
    return object.__new__(SUBSTITUTES[theirs.__module__, theirs.__qualname__])


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    # `__new__` cannot be deleted once it was set: object.__new__ would then refuse the
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
        },
    )


def _recorder(session: Session, **settings: Any) -> Recorder:
    def made(path: object) -> None:
        session.note(file=str(path))

    def failed(error: GradscaleError) -> None:
        session.note(failed=str(error))

    return Recorder(
        session.file,
        numbered=True,
        quiet=True,
        made=made,
        failed=failed,
        process=process_here,
        **settings,
    )
