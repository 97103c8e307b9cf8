"""Our scaler in place of torch's, in a script that knows nothing of it.

No name is replaced. Torch's classes stay what they are, wherever they were imported
from and whoever derives from them; but making one of them makes an object of a class
that is ours and derives from theirs. A class that a library derives from them keeps
its own methods: its objects are watched.
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
from gradscale.torch.messages import Watchman
from gradscale.torch.monitor.process import process_here
from gradscale.torch.names import names_of
from gradscale.torch.scaler import GradScaler
from gradscale.torch.sharded import ShardedGradScaler
from gradscale.torch.step.dispatch import unscales_itself

# Which of ours stands for which of theirs, by module and name: FSDP's is imported by
# those alone who need it.
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
    """What `gradscale run` tells the processes it reaches.

    Attributes:
        file: The run file.
        notes: A file to which each process adds a line for what it did.
    """

    file: str
    notes: str

    def note(self, **facts: object) -> None:
        """Add a line to the notes, whole or not at all."""
        line = json.dumps(facts) + "\n"
        try:
            place = os.open(self.notes, os.O_WRONLY | os.O_APPEND)
        except OSError:
            # The command has ended before a process that it started.
            return
        with os.fdopen(place, "ab", buffering=0) as notes:
            notes.write(line.encode())


class Recorded(GradScaler):
    """A scaler that records itself. Its classes are made by `_recorded`."""

    stands_for: ClassVar[type]
    session: ClassVar[Session]

    def _begin(self) -> None:
        if self._record is None:
            self._record = _recorder(
                self.session, policy=self._policy, names=self._parameter_names
            )
        elif not isinstance(self._record, Recorder):
            # The script records by itself, where it likes.
            self.session.note(file=os.path.abspath(self._record))
        super()._begin()
        if isinstance(self._record, Recorder):
            # Only what torch would print is printed; the rest is in the file.
            self._watchman = _QuietWatchman(self._record, self.stands_for)
        self.session.note(made=type(self).__name__, enabled=self._enabled)

    def _parameter_names(self) -> list[str]:
        steps = [s for s in self._iteration.settled.values() if s.optimizer is not None]
        return [name for step in steps for name in names_of(step.params(), step.names)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The name leads to torch's class: it says what to make, not what it is.
        return _made_again, (self.stands_for,), self.__getstate__()


class _QuietWatchman(Watchman):
    """Writes into the run file what others would be warned of."""

    def __init__(self, recorder: Recorder, stands_for: type) -> None:
        super().__init__()
        self._recorder = recorder
        self._for_torchs = not issubclass(stands_for, GradScaler)

    def warn_no_gradients(self, optimizer: Any) -> None:
        ends = self._for_torchs and not unscales_itself(optimizer)
        if ends:
            # The file is all that will tell why.
            self._recorder.begin()
        super().warn_no_gradients(optimizer)
        if ends:
            # Torch's scaler ends the script here, and so must we.
            raise AssertionError("No inf checks were recorded for this optimizer.")

    def _warn_once(
        self, key: object, message: str, code: str, *, stacklevel: int
    ) -> None:
        if key not in self._said:
            self._said.add(key)
            self._recorder.event(code, data={"what": message})


def install(environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Let everybody who makes one of torch's scalers get a recorded one of ours.

    Args:
        environment: What `gradscale run` has set for the processes it reaches.

    Returns:
        What undoes it, for those made from then on.
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
        # Only classes derived by others come here: ours do not call it.
        original_init(self, *args, **kwargs)
        session.note(made=type(self).__name__, enabled=self._enabled)
        if self._enabled:
            watch(self, record=_recorder(session, meta=described(self)))

    # What tells people and programs the arguments of a class.
    new.__signature__ = inspect.signature(original_init)  # type: ignore[attr-defined]
    base.__new__ = new  # type: ignore[method-assign]
    base.__init__ = init  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", category=GradscaleWarning)

    def undo() -> None:
        base.__init__ = original_init  # type: ignore[method-assign]
        base.__new__ = _plain_new  # type: ignore[method-assign]

    return undo


def _made_again(theirs: Any) -> GradScaler:
    """Return an empty scaler for a pickled one, recorded where others are."""
    made = theirs.__new__(theirs)
    if isinstance(made, GradScaler):
        return made
    return object.__new__(SUBSTITUTES[theirs.__module__, theirs.__qualname__])


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    # Once set, `__new__` cannot be taken away again: without one of its own, Python
    # would refuse the arguments.
    return object.__new__(cls)


def _recorded(ours: type[GradScaler], theirs: type, session: Session) -> type:
    """Return a class of ours that is also one of theirs, and is called the same."""
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


def _recorder(session: Session, **about: Any) -> Recorder:
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
        **about,
    )
