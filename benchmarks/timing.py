"""Clocks for a step: wall time, device time behind a busy device, and host time.

On an idle GPU a step mostly waits for the host. In training the host is ahead, because
the device is still busy with the backward pass. To measure device time, a long pause is
enqueued first, the step is enqueued during the pause, and two events around the step
give the time of the device alone.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.record import quantiles

Step = Callable[[], object]
WARM_UP = 3
# For a step whose host waits for the device: a longer pause would not help.
SHORT_MS = 2.0


def synchronize(device: str) -> None:
    """Wait for the device; returns at once on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def wall_ms(step: Step, device: str) -> float:
    """Return the wall time of a step in ms, host and device."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


class Queued(NamedTuple):
    """The times of a step that was enqueued behind a pause.

    Attributes:
        device: ms of device time, from the end of the pause.
        host: ms until the host had enqueued everything.
        late: The pause ended before the host was done, so the device may have idled and
            its time may be too long.
    """

    device: float
    host: float
    late: bool


class Queue:
    """A GPU that is kept busy while the host enqueues a step."""

    def __init__(self) -> None:
        # Long enough for the GPU to reach its full clock rate.
        torch.cuda._sleep(200_000_000)
        self._cycles_per_ms = 1.0
        cycles = 20_000_000
        pause = self.timed(lambda: torch.cuda._sleep(cycles), 1.0)
        self._cycles_per_ms = cycles / pause.device

    def timed(self, step: Step, busy_ms: float) -> Queued:
        """Time the step behind a pause of this length."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(busy_ms * self._cycles_per_ms))
        start.record()
        begin = time.perf_counter()
        step()
        host = 1e3 * (time.perf_counter() - begin)
        late = start.query()
        end.record()
        torch.cuda.synchronize()
        return Queued(start.elapsed_time(end), host, late)


def queue_of(device: str) -> Queue | None:
    """Return the queue of a GPU; None on a CPU."""
    return Queue() if device == "cuda" else None


class Stopwatch:
    """The times of one implementation in ms, a list for each clock.

    Args:
        step: The timed function.
        prepare: Called before each step, untimed.
        device: "cpu" or "cuda".
        queue: The GPU's, or None for wall time only.
        clock: The main clock on a GPU: "device" or "host".

    Attributes:
        times: Of "wall", and on a GPU of "device" and "host".
        clock: The main clock.
        waits: The host waits for the device within a step, or for space in its queue,
            for any length of the pause.
        late: Number of steps that were late.
    """

    def __init__(
        self,
        step: Step,
        prepare: Step,
        device: str,
        queue: Queue | None,
        clock: str = "device",
    ) -> None:
        self.step, self.prepare, self.place, self.queue = step, prepare, device, queue
        self.clock = "wall" if queue is None else clock
        clocks = ("wall",) if queue is None else ("wall", "device", "host")
        self.times: dict[str, list[float]] = {name: [] for name in clocks}
        self.waits = False
        self.late = 0
        self.busy_ms = SHORT_MS

    def warm_up(self) -> None:
        """Compile, allocate, and choose the length of the pause."""
        for _ in range(WARM_UP):
            self.prepare()
            alone = wall_ms(self.step, self.place)
        if self.queue is None:
            return
        # The wall time is at least the host time.
        self.busy_ms = 2.0 * alone + 5.0
        self.waits = self._behind_pause(tries=2).late
        if self.waits:
            self.busy_ms = SHORT_MS

    def take(self) -> None:
        """Take a step for each clock."""
        self.prepare()
        self.times["wall"].append(wall_ms(self.step, self.place))
        if self.queue is None:
            return
        seen = self._behind_pause(tries=1 if self.waits else 3)
        self.times["device"].append(seen.device)
        self.times["host"].append(seen.host)
        self.late += seen.late

    def _behind_pause(self, tries: int) -> Queued:
        """Return the first try that was not late, else the last; double the pause."""
        assert self.queue is not None
        for left in reversed(range(tries)):
            self.prepare()
            seen = self.queue.timed(self.step, self.busy_ms)
            if not seen.late:
                break
            if left:
                self.busy_ms *= 2.0
        return seen

    def main(self) -> list[float]:
        """Return the times of the main clock."""
        return self.times[self.clock]

    def figures(self) -> dict[str, Any]:
        """Return the quantiles of every clock; those of the main clock unprefixed.

        Host times are omitted where the host waits: they would be those of the device.
        """
        shown: dict[str, Any] = {"clock": self.clock, **quantiles(self.main())}
        if self.queue is not None:
            shown |= {"waits": self.waits, "late": self.late}
        for clock, times in self.times.items():
            if clock != "host" or not self.waits:
                found = quantiles(times).items()
                shown |= {f"{clock}_{key}": ms for key, ms in found}
        return shown


def in_order(*steps: Step) -> Step:
    """Return a function that calls all of these in order."""

    def all_of_them() -> None:
        for step in steps:
            step()

    return all_of_them


def in_turns(names: Sequence[str], rounds: int, title: str) -> Iterator[str]:
    """Yield every name once a round, behind a progress bar.

    The order changes from round to round, so that no name always follows the same one.
    """
    for turn in track(range(rounds), title, console=Console(stderr=True)):
        first = turn % len(names)
        order = [*names[first:], *names[:first]]
        yield from order if turn % 2 == 0 else reversed(order)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the paired ratios."""
    return statistics.median(ratios(ours, theirs))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of each pair of turns."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def upper_bound(values: Sequence[float], draws: int = 2000) -> float:
    """Return the 95 % upper confidence bound of the median, by the bootstrap."""
    dice = random.Random(0)
    medians = sorted(
        statistics.median(dice.choices(values, k=len(values))) for _ in range(draws)
    )
    return medians[int(0.95 * draws)]


def bytes_per_ms(device: str, queue: Queue | None, size: int = 0) -> float:
    """Return the bytes per ms that a copy on the device reads and writes.

    Args:
        device, queue: As for `Stopwatch`.
        size: Bytes to copy; by default 2 GiB on a GPU, 256 MiB on a CPU.
    """
    size = size or (2**31 if device == "cuda" else 2**28)
    # Random: memory may be faster with zeros.
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    watch = Stopwatch(lambda: target.copy_(source), lambda: None, device, queue)
    watch.warm_up()
    for _ in range(20):
        watch.take()
    return 2 * size / statistics.median(watch.main())
