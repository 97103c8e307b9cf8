"""The writer of a run file. A thread commits; training never waits for the disk."""

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from gradscale.errors import ConfigError, GradscaleError, GradscaleWarning
from gradscale.runfile.committer import Committer, Flush, Item
from gradscale.runfile.creation import journal_for, path_for_rank, prepare
from gradscale.runfile.inserts import Detail, Event, Meta, Peaks, Samples
from gradscale.runfile.process_hooks import AtExit, ignore_forks, watch_forks
from gradscale.runfile.rows import StepRow, TensorSample, storable
from gradscale.runfile.schema import as_json
from gradscale.runfile.thinning import due

# Rows that may wait for the disk: ten minutes of 200 steps a second, about 20 MB.
BACKLOG = 1 << 17
# Steps with details that may wait; each may have thousands of tensors.
DETAILS = 64
# Seconds that close() waits for a disk that hangs.
PATIENCE = 10.0
_now = time.time
_ROOM = os.path.dirname(__file__)


class RunWriter:
    """Records a run in one SQLite file; see docs/runfile.md.

    Rows are queued in memory and committed by a thread several times a second. Only
    `flush` and `close` wait for the disk, and no method raises once the writer is
    constructed: a later failure issues one warning, which is printed to stderr where
    warnings are errors, and recording stops. A writer is inert in a forked process and
    when it is unpickled. All methods may be called from any thread.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with RunWriter(folder.name + "/run.gs", meta={"policy": "DynamicScale"}) as run:
    ...     for step in (1, 2, 3):
    ...         run.step(step, 65536.0, True, "GS000", loss=2.5 / step)
    >>> from gradscale.runfile import open_run
    >>> with open_run(folder.name + "/run.gs") as run:
    ...     [(row.step, row.loss) for row in run.steps()]
    [(1, 2.5), (2, 1.25), (3, 0.8333333333333334)]
    >>> folder.cleanup()

    Args:
        path: The file; by convention it ends in .gs.
        meta: Further entries of `meta`, JSON values: the policy, for instance.
        resume: Continue an existing file, or create one. A step that is written again
            replaces the old one and all after it. Before the first such replacement
            the file is copied to the next free numbered name (run.2.gs), so that no
            recorded row is lost; `meta["resumed"]` names the copy.
        rank: The rank of this process. Rank 0 writes, the others do nothing.
        world_size: The number of ranks.
        every_rank: The other ranks write too: rank 3 into run.rank3.gs.
        sample_every: The interval of the steps for which `due` is True.
        journal: "wal", or "truncate" for network file systems; "auto" detects them.
        backlog: The number of rows that may wait for the disk; further ones are
            dropped.
        report: Called with the warning of a later failure, instead of issuing it.

    Raises:
        StateError: The file exists and `resume` is False, or another writer has it
            open (GS305); it cannot be continued (GS306, GS307), or cannot be created
            (GS308).

    Attributes:
        path: The file; None if this rank writes none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        meta: Mapping[str, Any] | None = None,
        resume: bool = False,
        rank: int = 0,
        world_size: int = 1,
        every_rank: bool = False,
        sample_every: int = 100,
        journal: Literal["auto", "wal", "truncate"] = "auto",
        backlog: int = BACKLOG,
        report: Callable[[GradscaleWarning], None] | None = None,
    ) -> None:
        check_sample_every(sample_every)
        self.path: Path | None = None
        self._recording = False
        self._warning: GradscaleWarning | None = None
        self._report = report
        self._every = sample_every
        self._backlog = backlog
        self._queue: deque[Item] = deque()
        self._details = 0
        self._dropped = 0
        self._pid = os.getpid()
        if rank != 0 and not every_rank:
            return
        self.path = path_for_rank(path, rank)
        chosen = journal_for(self.path) if journal == "auto" else journal
        about = {"rank": rank, "world_size": world_size, "sample_every": sample_every}
        continued = prepare(
            self.path, {**about, "journal": chosen, **(meta or {})}, resume
        )
        self._committer = Committer(
            self.path, chosen, self._queue, sample_every, continued, self._stop
        )
        self._recording = True
        watch_forks(self)
        self._committer.start()
        self._at_exit = AtExit(self._close_at_exit)

    @property
    def recording(self) -> bool:
        """True as long as new rows will be written."""
        return self._recording

    @property
    def dropped(self) -> int:
        """The number of rows dropped because the disk did not keep up."""
        return self._dropped

    def due(self, step: int) -> bool:
        """Return whether peaks and samples of a healthy step are wanted."""
        return self._recording and due(step, self._every)

    def step(
        self,
        step: int,
        scale: float,
        applied: bool,
        verdict: str,
        norm: float | None = None,
        amax: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Record one step: the fields of `StepRow`, plain Python numbers.

        Steps come in ascending order, each before its events, peaks and samples. A
        step that is not above the last one restarts the run from that point: it
        replaces all rows from it on.
        """
        queue = self._queue
        if not self._recording or len(queue) >= self._backlog:
            self._refuse()
            return
        queue.append(StepRow(step, _now(), scale, applied, verdict, norm, amax, loss))

    def event(
        self,
        code: str,
        *,
        step: int | None = None,
        where: str | None = None,
        data: object = None,
    ) -> None:
        """Record an event under a code of the catalogue; `data` is copied as JSON."""
        place = None if where is None else storable(where)
        self._enqueue(Event(step, _now(), code, place, as_json(data)))

    def peaks(self, step: int, peaks: Mapping[str, float]) -> None:
        """Record the largest magnitude in each tensor, by name, for one step.

        Wanted for steps with an event and where `due(step)`. Do not change the mapping
        afterwards.
        """
        self._enqueue_detail(Peaks(step, peaks))

    def samples(self, step: int, samples: Mapping[str, TensorSample]) -> None:
        """Record the counts of the underflow meter by tensor, where `due(step)`.

        Do not change the mapping afterwards.
        """
        self._enqueue_detail(Samples(step, samples))

    def set_meta(self, **entries: object) -> None:
        """Set entries of `meta`, JSON values; do not change them afterwards."""
        self._enqueue(Meta(dict(entries)))

    def flush(self, timeout: float = PATIENCE) -> bool:
        """Wait until all queued rows are on the disk; False if they are not."""
        if not self._recording:
            self._warn()
            return False
        done = Flush()
        self._queue.append(done)
        self._committer.wake()
        until = time.monotonic() + timeout
        # In short intervals: a thread that has to stop clears the queue, marks too.
        while self._recording and time.monotonic() < until and not done.wait(0.05):
            pass
        self._warn()
        return done.is_set() and self._recording

    def close(self, end: str = "closed", **facts: object) -> None:
        """Write the remaining rows and the end state; a second call does nothing.

        Args:
            end: The end state, in a word.
            facts: Further facts about the end, JSON values.
        """
        if os.getpid() != self._pid:
            return
        if self._recording:
            self._recording = False
            state = {"state": end, "time": _now(), **facts}
            self._queue.append(Meta({"end": state}))
            self._committer.finish(PATIENCE)
            ignore_forks(self)
            self._at_exit.cancel()
        self._warn()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self.close("error", error=error.__name__)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy in another process must not write to the same file.
        return _inert, (self._every,)

    def _enqueue(self, item: Detail) -> bool:
        if not self._recording or len(self._queue) >= self._backlog:
            self._refuse()
            return False
        self._queue.append(item)
        return True

    def _enqueue_detail(self, item: Peaks | Samples) -> None:
        # Counted without a lock: a limit of 63 or 65 is as good as 64.
        if self._recording and self._details - self._committer.details >= DETAILS:
            self._committer.details_dropped += 1
            return
        self._details += self._enqueue(item)

    def _refuse(self) -> None:
        """Count a row that is not recorded, and warn once."""
        if not self._recording:
            self._warn()
            return
        self._dropped += 1
        self._committer.dropped = self._dropped
        if self._dropped == 1:
            self._warning = _falls_behind(self.path, self._backlog)
            self._warn()

    def _warn(self) -> None:
        """Issue the pending warning, at the line that called into this package."""
        warning, self._warning = self._warning, None
        if warning is None:
            return
        if self._report is not None:
            self._report(warning)
            return
        level, frame = 1, sys._getframe(0)
        while frame.f_back and os.path.dirname(frame.f_code.co_filename) == _ROOM:
            level, frame = level + 1, frame.f_back
        try:
            warnings.warn(warning, stacklevel=level)
        except GradscaleWarning:
            # Warnings are errors here. The training must not end with the record.
            print(f"gradscale {warning}", file=sys.stderr)

    def _stop(self, why: str) -> None:
        """Stop recording. Called by the thread; the next call of a method warns."""
        # In this order, so that the reason is set before recording visibly stops.
        self._warning = _stopped(self.path, why)
        self._recording = False
        self._queue.clear()

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_type", None)
        if error is None:
            self.close("exit")
            return
        value = getattr(sys, "last_value", None)
        if isinstance(value, GradscaleError):
            text = str(value).splitlines()[0].removesuffix(f" [{value.code}]")
            what = f"the run ended with {error.__name__}: {text}"
            self.event(value.code, data={"what": what})
        self.close("error", error=error.__name__)

    def hold(self, seconds: float) -> bool:
        """Block new transactions, before a fork."""
        return self._committer.between.acquire(timeout=seconds)

    def release(self) -> None:
        """Allow transactions again, after a fork."""
        self._committer.between.release()

    def disable(self) -> None:
        """Record nothing in a forked process, and warn at the first attempt."""
        self._recording = False
        self._queue = deque()
        self._warning = _forked(self.path)


def check_sample_every(steps: int) -> None:
    """Raise for an invalid interval of sampled steps."""
    if steps < 1:
        raise ConfigError(
            f"sample_every={steps} is not a distance between steps. Every "
            "sample_every-th step is sampled, so it must be 1 or more. Pass 100.",
            code="GS101",
        )


def _inert(every: int) -> RunWriter:
    """Return a writer that records nothing."""
    return RunWriter("", rank=1, sample_every=every)


def _falls_behind(path: Path | None, backlog: int) -> GradscaleWarning:
    return GradscaleWarning(
        f"{backlog} rows wait to be written to {path}, and further ones are dropped "
        "until there is room. The disk does not keep up, so the record has gaps. "
        "Write it to a local disk.",
        code="GS309",
    )


def _stopped(path: Path | None, why: str) -> GradscaleWarning:
    return GradscaleWarning(
        f"Recording to {path} has stopped: {why}. The rows written so far are kept; "
        "the training is not affected. Check that the folder of the file exists, has "
        "free space and is writable.",
        code="GS308",
    )


def _forked(path: Path | None) -> GradscaleWarning:
    return GradscaleWarning(
        f"Recording to {path} has stopped in process {os.getpid()}, a fork of the "
        "process that records. Two processes cannot write one run file. Record in the "
        "process that trains, or construct a RunWriter here.",
        code="GS308",
    )
