"""Clocks for a step: by itself, behind a busy device, and on the host alone.

On a GPU a step by itself mostly waits for the host, which in training is ahead: the
device is still busy with the backward pass. So a long pause is queued first, the step
is handed over while it lasts, and two events around the step then tell the time of the
device alone.
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
# A pause for a step that waits for the device, however long the pause is.
SHORT_MS = 2.0


def synchronize(device: str) -> None:
    """Wait until the device is done; a CPU always is."""
    if device == "cuda":
        torch.cuda.synchronize()


def wall_ms(step: Step, device: str) -> float:
    """Return the time of a step by itself in ms, host and device."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


class Queued(NamedTuple):
    """The times of a step that was handed over behind a pause.

    Attributes:
        device: ms that the device took, from the end of the pause.
        host: ms until the host had handed everything over.
        late: The pause was over by then, so that the device may have waited in
            between and its time is too long.
    """

    device: float
    host: float
    late: bool


class Queue:
    """A GPU that is kept busy while the host hands over a step."""

    def __init__(self) -> None:
        # Long enough for the clock of the GPU to reach its speed.
        torch.cuda._sleep(200_000_000)
        self._cycles_per_ms = 1.0
        cycles = 20_000_000
        pause = self.timed(lambda: torch.cuda._sleep(cycles), 1.0)
        self._cycles_per_ms = cycles / pause.device

    def timed(self, step: Step, busy_ms: float) -> Queued:
        """Return what the step takes behind a pause of this length."""
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
    """Return the queue of a GPU; a CPU has none."""
    return Queue() if device == "cuda" else None


class Stopwatch:
    """The times of one contestant, in ms, a list for each clock.

    Args:
        step: What is timed.
        prepare: Called before each step, outside of the timing.
        device: "cpu" or "cuda".
        queue: The GPU's, or None for the time of a step by itself only.
        clock: The one that counts on a GPU: "device" or "host".

    Attributes:
        times: Those of "wall", and on a GPU those of "device" and "host".
        clock: The one that counts.
        waits: The host waits for the device in the middle of a step, or for a place
            in its queue, however long the pause is.
        late: How many of the steps were late for another reason, or by waiting.
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
        """Compile, allocate, and find out how long a pause must be."""
        for _ in range(WARM_UP):
            self.prepare()
            alone = wall_ms(self.step, self.place)
        if self.queue is None:
            return
        # By itself a step takes at least as long as the host needs for it.
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
        """Return the first try that was not late, else the last; pause ever longer."""
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
        """Return the times of the clock that counts."""
        return self.times[self.clock]

    def figures(self) -> dict[str, Any]:
        """Return the quantiles of every clock; of the one that counts, by themselves.

        The host's are left out where it waits: they would be those of the device.
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
    """Return one step that takes all of these."""

    def all_of_them() -> None:
        for step in steps:
            step()

    return all_of_them


def in_turns(names: Sequence[str], rounds: int, title: str) -> Iterator[str]:
    """Yield every name once a round, behind a progress bar.

    Nobody always goes first, or always after the same one.
    """
    for turn in track(range(rounds), title, console=Console(stderr=True)):
        first = turn % len(names)
        order = [*names[first:], *names[:first]]
        yield from order if turn % 2 == 0 else reversed(order)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios within a turn."""
    return statistics.median(ratios(ours, theirs))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of every turn."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def upper_bound(values: Sequence[float], draws: int = 2000) -> float:
    """Return what the median lies under with 95 % confidence, by the bootstrap."""
    dice = random.Random(0)
    medians = sorted(
        statistics.median(dice.choices(values, k=len(values))) for _ in range(draws)
    )
    return medians[int(0.95 * draws)]


def bytes_per_ms(device: str, queue: Queue | None, size: int = 0) -> float:
    """Return how many bytes a copy on the device reads and writes in a ms.

    Args:
        device, queue: Where, and its queue.
        size: Bytes to copy; by default 2 GiB on a GPU, 256 MiB on a CPU.
    """
    size = size or (2**31 if device == "cuda" else 2**28)
    # Random: a memory may be faster with zeros.
    source = torch.empty(size // 4, device=device).normal_()
    target = torch.empty_like(source)
    watch = Stopwatch(lambda: target.copy_(source), lambda: None, device, queue)
    watch.warm_up()
    for _ in range(20):
        watch.take()
    return 2 * size / statistics.median(watch.main())
