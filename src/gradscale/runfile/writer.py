"""The writer of a run file: one thread that never holds the training up."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from gradscale.errors import ConfigError, GradscaleWarning
from gradscale.runfile import forks
from gradscale.runfile.committer import Committer, Flush
from gradscale.runfile.creation import path_for_rank, prepare
from gradscale.runfile.filesystem import journal_for
from gradscale.runfile.notices import AtEnd, behind, forked, say, stopped
from gradscale.runfile.rows import TensorSample
from gradscale.runfile.tables import Detail, Meta, Peaks, Samples, StepTuple, event
from gradscale.runfile.thinning import due

# Rows that may wait for the disk: ten minutes of 200 steps a second, about 20 MB.
BACKLOG = 1 << 17
# Steps with details that may wait; each may have thousands of tensors.
DETAILS = 64
# How long close() waits for a disk that hangs.
PATIENCE = 10.0
_now = time.time


class RunWriter:
    """Records a run in one SQLite file; see docs/runfile.md.

    Rows are handed over in memory and written by a thread of its own, several times a
    second. Nothing here waits for the disk but `flush` and `close`, and nothing raises
    once the writer is made: what goes wrong later is said in one warning, and
    recording stops. In a forked process, or unpickled in another one, a writer is
    inert. All methods may be called from any thread.

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
        path: The file; by custom it ends in .gs.
        meta: What else is to be known of the run, as JSON has it: the policy, say.
        resume: Go on with a file that is there, and make one if not. A step that is
            written again replaces the old one and all after it.
        rank: Which rank this is. Rank 0 writes, the others do nothing.
        world_size: How many ranks there are.
        every_rank: The other ranks write too: rank 3 into run.rank3.gs.
        sample_every: The distance of the steps for which `due` is True.
        journal: "wal", or "truncate" for network file systems; "auto" looks.
        backlog: How many rows may wait for the disk before some are dropped.

    Raises:
        StateError: The file is there and `resume` is False (GS305), cannot be gone on
            with (GS306, GS307), or cannot be made (GS308).

    Attributes:
        path: The file that is written; None if this rank writes none.
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
    ) -> None:
        if sample_every < 1:
            raise ConfigError(
                f"sample_every={sample_every} is no distance between steps. Every "
                "sample_every-th step is sampled, so it must be 1 or more. Pass 100.",
                code="GS101",
            )
        self.path: Path | None = None
        self._recording = False
        self._notice: GradscaleWarning | None = None
        self._every = sample_every
        self._backlog = backlog
        self._queue: deque[StepTuple | Detail | Flush] = deque()
        self._details = 0
        self._dropped = 0
        self._pid = os.getpid()
        if rank != 0 and not every_rank:
            return
        self.path = path_for_rank(path, rank)
        chosen = journal_for(self.path) if journal == "auto" else journal
        about = {"rank": rank, "world_size": world_size, "sample_every": sample_every}
        prepare(self.path, {**about, "journal": chosen, **(meta or {})}, resume)
        self._committer = Committer(
            self.path, chosen, self._queue, sample_every, self._settle
        )
        self._recording = True
        forks.watch(self)
        self._committer.start()
        self._at_end = AtEnd(self._at_exit)

    @property
    def recording(self) -> bool:
        """True as long as what is handed over will be written."""
        return self._recording

    @property
    def dropped(self) -> int:
        """How many rows were dropped because the disk did not keep up."""
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
        """Record one step: plain Python numbers, and the code of the verdict.

        Steps come in ascending order, each before its events, peaks and samples. One
        that is not above the last is taken for a run that goes on from an earlier
        point: it replaces all from it on.
        """
        queue = self._queue
        if not self._recording or len(queue) >= self._backlog:
            self._refuse()
            return
        queue.append((step, _now(), scale, applied, verdict, norm, amax, loss))

    def rows(self, rows: Iterable[StepTuple]) -> None:
        """Record steps as `step` does; each row begins with its step and its time."""
        for row in rows:
            if not self._recording or len(self._queue) >= self._backlog:
                self._refuse()
            else:
                self._queue.append(row)

    def ask(self, ask: Callable[[], None]) -> None:
        """Have this called before each commit, in a thread, and never in a fork."""
        if self._recording:
            self._committer.ask = ask

    def event(
        self,
        code: str,
        *,
        step: int | None = None,
        where: str | None = None,
        data: object = None,
    ) -> None:
        """Record something that happened, under a code of the catalogue."""
        self._hand_over(event(step, _now(), code, where, data))

    def peaks(self, step: int, peaks: Mapping[str, float]) -> None:
        """Record the largest magnitude in each tensor, by name, for one step.

        Wanted where something happened and where `due(step)`. The mapping must not be
        changed afterwards.
        """
        self._hand_over_detail(Peaks(step, peaks))

    def samples(self, step: int, samples: Mapping[str, TensorSample]) -> None:
        """Record what the underflow meter counted, by tensor, where `due(step)`.

        The mapping must not be changed afterwards.
        """
        self._hand_over_detail(Samples(step, samples))

    def set_meta(self, **entries: object) -> None:
        """Set entries of `meta`; values must not be changed afterwards."""
        self._hand_over(Meta(dict(entries)))

    def flush(self, timeout: float = PATIENCE) -> bool:
        """Wait until all that was handed over is on the disk; False if it is not."""
        if not self._recording:
            self._say()
            return False
        done = Flush()
        self._queue.append(done)
        self._committer.hurry()
        until = time.monotonic() + timeout
        # In short pieces: a thread that has to stop empties the queue, marks and all.
        while self._recording and time.monotonic() < until and not done.wait(0.05):
            pass
        self._say()
        return done.is_set() and self._recording

    def close(self, end: str = "closed", **facts: object) -> None:
        """Write what is left and the end state; a second call does nothing.

        Args:
            end: How the run ended, in a word.
            facts: What else is known of the end, as JSON has it.
        """
        if os.getpid() != self._pid:
            return
        if self._recording:
            self._recording = False
            state = {"state": end, "time": _now(), **facts}
            self._queue.append(Meta({"end": state}))
            self._committer.finish(PATIENCE)
            self._forget()
        self._say()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close("error", error=kind.__name__)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy in another process must not write to the same file.
        return _inert, (self._every,)

    def _hand_over(self, item: Detail) -> bool:
        if not self._recording or len(self._queue) >= self._backlog:
            self._refuse()
            return False
        self._queue.append(item)
        return True

    def _hand_over_detail(self, item: Peaks | Samples) -> None:
        # Counted without a lock: one more or less of the 64 does no harm.
        if self._recording and self._details - self._committer.details >= DETAILS:
            self._committer.details_dropped += 1
            return
        self._details += self._hand_over(item)

    def _refuse(self) -> None:
        """Say once why something is not recorded."""
        if not self._recording:
            self._say()
            return
        self._dropped += 1
        self._committer.dropped = self._dropped
        if self._dropped == 1:
            self._notice = behind(self.path, self._backlog)
            self._say()

    def _say(self) -> None:
        notice, self._notice = self._notice, None
        if notice is not None:
            say(notice)

    def _settle(self, why: str) -> None:
        """Stop recording for a reason that comes up in the thread."""
        self._recording = False
        self._notice = stopped(self.path, why)
        self._queue.clear()

    def _forget(self) -> None:
        forks.forget(self)
        self._at_end.cancel()

    def _at_exit(self) -> None:
        kind = getattr(sys, "last_type", None)
        if kind is None:
            self.close("exit")
        else:
            self.close("error", error=kind.__name__)

    def hold(self, seconds: float) -> bool:
        """Keep transactions from beginning, before a fork."""
        return self._committer.between.acquire(timeout=seconds)

    def release(self) -> None:
        """Let transactions begin again, after a fork."""
        self._committer.between.release()

    def become_inert(self) -> None:
        """Record nothing in a forked process, and say so at the first attempt."""
        self._recording = False
        self._queue = deque()
        self._notice = forked(self.path)


def _inert(every: int) -> RunWriter:
    """Return a writer that records nothing."""
    return RunWriter("", rank=1, sample_every=every)
