"""One run file for several scalers of a process, in the order of their updates."""

import heapq
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from gradscale.core.records import StepRecord, classify
from gradscale.judge.history import StepSequence
from gradscale.judge.judge import Judge, Judgement
from gradscale.recording.recorder import Recorder, described
from gradscale.runfile import RunWriter, TensorSample

MADE_ANEW = "GS118"
# Updates of a scaler whose rows may be pending.
IN_FLIGHT = 16
# Rows that wait for those of another scaler before it is drained.
LONGEST_WAIT = 64


class SharedFiles:
    """The run files of a process: one for each of its threads that trains."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], SharedFile] = {}

    def here(self) -> "SharedFile":
        """Return the file of this thread, in which a new scaler is recorded."""
        # A forked process has files of its own.
        key = os.getpid(), threading.get_ident()
        file = self._files.get(key)
        if file is None or not file.open:
            file = self._files[key] = SharedFile()
        return file

    def close(self) -> None:
        """Write pending rows and close all files."""
        for file in list(self._files.values()):
            file.close()


class SharedFile:
    """Merges the rows of several scalers into one run file.

    An update gets the next number of the file when it is made. Its row reaches the
    host some updates later, and waits here until no row with a lower number is
    missing. Then it is judged in the order of the file, as by a reader of the file.

    Attributes:
        writer: Writes the file; None if this process writes none.
        judge: Judges the rows of all scalers.
        sequence: Recomputes the fields of records that depend on earlier steps.
        culprits: The non-finite tensors that were written last.
        lock: Held by every method: a scaler may be deleted in any thread.
        parts: The recorders of the scalers that are alive.
        begun: Scalers recorded so far.
    """

    def __init__(self) -> None:
        self.writer: RunWriter | None = None
        self.judge, self.sequence = Judge(), StepSequence()
        self.culprits: tuple[str, ...] = ()
        self.lock = threading.RLock()
        self.parts: list[SharedRecorder] = []
        self.begun = 0
        self._number = 0
        # Number of the step, order of arrival, call that writes.
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._arrival = count()
        self._writing = False
        self._optimizers: list[weakref.ref[Any]] = []
        self._names: list[str] = []

    @property
    def open(self) -> bool:
        """True before the first scaler begins, and while rows are being written."""
        return not self.begun or (self.writer is not None and self.writer.recording)

    def next_number(self, start: int = 0) -> int:
        """Return the number of the next step of the file.

        Args:
            start: The steps before the first one, of a run that is resumed.
        """
        self._number = (self._number or start) + 1
        return self._number

    def has_stepped(self, optimizers: Iterable[Any]) -> bool:
        """Add optimizers; return whether an earlier scaler has stepped one of them."""
        known = {id(each) for ref in self._optimizers if (each := ref()) is not None}
        given = [each for each in optimizers if each is not None]
        for optimizer in given:
            # One with __slots__ has no weak references.
            with suppress(TypeError):
                self._optimizers.append(weakref.ref(optimizer))
        return any(id(optimizer) in known for optimizer in given)

    def add_names(self, names: Sequence[str]) -> None:
        """Add the parameters of one more scaler to `meta`."""
        known = set(self._names)
        new = [name for name in names if name not in known]
        self._names += new
        self.judge.tensors = len(self._names)
        if self.begun and new and self.writer is not None:
            self.writer.set_meta(parameters=list(self._names))

    def put(self, number: int, write: Callable[[], None]) -> None:
        """Call `write` once all rows with lower numbers are written."""
        heapq.heappush(self._waiting, (number, next(self._arrival), write))
        self.write_due()

    def write_due(self) -> None:
        """Write the rows that wait for no other."""
        if self._writing:
            # Called by a finalizer within the loop below, which writes these rows, too.
            return
        self._writing = True
        try:
            while self._waiting:
                number = self._waiting[0][0]
                if any(part.awaits_before(number) for part in self.parts):
                    break
                heapq.heappop(self._waiting)[2]()
        finally:
            self._writing = False

    def hurry(self, caller: "SharedRecorder") -> None:
        """Drain scalers that many rows wait for: they update rarely, or not at all."""
        if len(self._waiting) > LONGEST_WAIT:
            for part in [each for each in self.parts if each is not caller]:
                part.catch_up()
            self.write_due()

    def close(self) -> None:
        """Write all rows, pending ones included, and close the file."""
        self.finish()
        if self.writer is not None:
            self.writer.close()

    def finish(self) -> None:
        """Write all rows, pending ones included."""
        with self.lock:
            for part in list(self.parts):
                part.close()


class SharedRecorder(Recorder):
    """Writes the steps of one scaler into the file of all scalers of its thread.

    The first one to begin creates the file. Each further one is an event, GS118, in
    its first step. The file stays open until the process ends.

    >>> import tempfile
    >>> from gradscale.judge.judge import Judge
    >>> from gradscale.runfile import open_run
    >>> folder, files, judge = tempfile.TemporaryDirectory(), SharedFiles(), Judge()
    >>> for _ in range(2):
    ...     recorder = SharedRecorder(files, folder.name + "/run.gs", rank=0)
    ...     for own in (1, 2):
    ...         recorder.begin_update()
    ...         step = recorder.numbered(StepRecord(own, 1024.0, True, True))
    ...         recorder.see(step, judge.see(step))
    ...     recorder.close()
    >>> files.close()
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     [row.step for row in run.steps()]
    ...     [(event.code, event.step, event.data["number"]) for event in run.events()]
    [1, 2, 3, 4]
    [('GS118', 3, 2)]
    >>> folder.cleanup()

    Args:
        files: The files of the process.
        path: As in the base class.
        options: As in the base class.
    """

    def __init__(self, files: SharedFiles, path: Any, **options: Any) -> None:
        self._files = files
        self._file: SharedFile | None = None
        # Numbers of updates whose rows have not arrived.
        self._awaited: deque[int] = deque(maxlen=IN_FLIGHT)
        self._thread = 0
        self._introduction: dict[str, Any] | None = None
        self._closing = self._ended = False
        super().__init__(path, **options)

    def begin(self) -> bool:
        """Join the file of this thread, or create it."""
        if self.begun or os.getpid() != self._pid:
            self.begun = True
            return self.writer is not None
        file = self._file = self._files.here()
        with file.lock:
            if file.writer is None:
                file.judge = Judge(framework=self._framework)
                file.sequence = StepSequence({"policy": described(self._policy)})
                super().begin()
                file.writer = self.writer
            else:
                self._join(file, file.writer)
            for _, facts in self._early_events:
                self._observe(file, **facts)
            if self.writer is not None:
                file.parts.append(self)
                file.begun += 1
        return self.writer is not None

    def _join(self, file: SharedFile, writer: RunWriter) -> None:
        self.begun = True
        self.writer, self.path = writer, writer.path
        for code, facts in self._early_events:
            writer.event(code, **facts)
        self._parameter_names()
        self._introduction = {
            "observed": "scaler",
            "number": file.begun + 1,
            "alive": len(file.parts),
            "same_optimizer": False,
        }

    def _parameter_names(self) -> list[str]:
        names = super()._parameter_names()
        if self._file is not None:
            self._file.add_names(names)
        return names

    def _recording(self) -> SharedFile | None:
        """Return the file if this scaler, in this process, is still recorded."""
        writer = self.writer
        # A writer does not record in a fork, whose lock may be held for ever.
        ended = self._ended or writer is None or not writer.recording
        return None if ended else self._file

    def trains(self, optimizers: Iterable[Any], *, resumed: bool = False) -> None:
        """Note the optimizers of the first update."""
        file = self._recording()
        if file is not None:
            with file.lock:
                same = file.has_stepped(optimizers) or resumed
                # Not known before the first update.
                self._parameter_names()
            if self._introduction is not None:
                self._introduction["same_optimizer"] = same

    def begin_update(self, start: int = 0) -> None:
        """Give the current update the next number of the file."""
        if not self.begun:
            self.begin()
        file = self._recording()
        if file is None:
            return
        with file.lock:
            self._thread = threading.get_ident()
            self._awaited.append(file.next_number(start))
            file.hurry(self)

    def step_of_update(self, step: int) -> int:
        """Return the number of the current update."""
        return self._awaited[-1] if self._awaited else step

    def numbered(self, record: StepRecord) -> StepRecord:
        """Return a record with its number in the file."""
        file = self._recording()
        if file is None:
            return record
        if not self._awaited:
            # Replayed by a graph, without an update on the host.
            with file.lock:
                self._awaited.append(file.next_number())
        return record._replace(step=self._awaited[0])

    def see(
        self,
        record: StepRecord,
        judgement: Judgement,
        culprits: Sequence[str] = (),
        peaks: Mapping[str, float] | None = None,
    ) -> None:
        """Record one step, `numbered`, once those before it are recorded.

        Args:
            record: As in the base class.
            judgement: Not recorded: it is that of the steps of one scaler.
            culprits: As in the base class.
            peaks: As in the base class.
        """
        file = self._recording()
        if file is None:
            return
        number = record.step
        with file.lock:
            while self._awaited and self._awaited[0] <= number:
                self._awaited.popleft()
            file.put(number, partial(self._judge, file, record, culprits, peaks))

    def _judge(
        self,
        file: SharedFile,
        record: StepRecord,
        culprits: Sequence[str],
        peaks: Mapping[str, float] | None,
    ) -> None:
        """Judge and record the next step of the file."""
        if self._introduction is not None:
            data, self._introduction = self._introduction, None
            self._observe(file, step=record.step, data=data)
            super().event(MADE_ANEW, step=record.step, data=data)
        record = file.sequence.place(record, classify(record).code)
        judgement = file.judge.see(record, culprits)
        # Culprits are written if they are not those of the row before.
        self._culprits = file.culprits
        super().see(record, judgement, culprits, peaks)
        file.culprits = self._culprits

    def event(self, code: str, **facts: Any) -> None:
        """Record an event and pass it to the judge of all scalers."""
        file = self._recording()
        if file is not None:
            self._observe(file, **facts)
        super().event(code, **facts)

    def _observe(
        self, file: SharedFile, step: int = 0, data: Any = None, **_: Any
    ) -> None:
        if isinstance(data, Mapping):
            with file.lock:
                file.judge.observe(step, data)

    def sample(self, step: int, samples: Mapping[str, TensorSample]) -> None:
        """Record the counts of the underflow meter at a step, by tensor."""
        file = self._recording()
        if file is not None:
            with file.lock:
                file.put(step, partial(super().sample, step, samples))

    def awaits_before(self, number: int) -> bool:
        """Return whether the row of an update before `number` has not arrived."""
        return bool(self._awaited) and self._awaited[0] < number

    def catch_up(self) -> None:
        """Record pending rows. Syncs."""
        drain = self._before_end
        if drain is not None and self._thread == threading.get_ident():
            drain()
        self._awaited.clear()

    def close(self, end: str = "closed", **facts: object) -> None:
        """Record pending rows. The file stays open for other scalers."""
        file, writer = self._recording(), self.writer
        if file is None or writer is None:
            return
        with file.lock:
            if self._closing:
                # A finalizer during the drain below, which still records rows.
                return
            self._closing = True
            drain, self._before_end = self._before_end, None
            try:
                if drain is not None:
                    drain()
            finally:
                self._ended = True
                self._awaited.clear()
                if self in file.parts:
                    file.parts.remove(self)
                file.write_due()
        writer.flush()

    def _drain(self) -> None:
        # At the end of the process, for the recorder that has created the file.
        if self._file is not None and os.getpid() == self._pid:
            self._file.finish()
