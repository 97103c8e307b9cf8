"""The clocks of the benchmarks, on a queue that is made up."""

import statistics

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import Queued, Stopwatch, in_turns, ratio, upper_bound


class MadeUpQueue:
    """A device whose steps are late unless the pause is long enough for them."""

    def __init__(self, needed_ms):
        self.needed_ms = needed_ms
        self.pauses = []

    def timed(self, step, busy_ms):
        step()
        self.pauses.append(busy_ms)
        late = busy_ms < self.needed_ms
        return Queued(device=9.0 if late else 3.0, host=1.0, late=late)


def warm(queue, **how):
    """Return a warm stopwatch, and the calls it has made so far."""
    calls = []
    watch = Stopwatch(
        lambda: calls.append("step"),
        lambda: calls.append("prepare"),
        "cpu",
        queue,
        **how,
    )
    watch.warm_up()
    return watch, calls


def test_every_step_is_prepared():
    watch, calls = warm(MadeUpQueue(0.0))
    watch.take()
    assert calls == ["prepare", "step"] * (timing.WARM_UP + 3)


def test_the_warm_up_is_not_timed():
    watch, _ = warm(MadeUpQueue(0.0))
    assert watch.times == {"wall": [], "device": [], "host": []}


def test_the_clock_of_the_device_counts_on_a_gpu():
    watch, _ = warm(MadeUpQueue(0.0))
    watch.take()
    assert watch.main() == [3.0]
    assert watch.figures()["clock"] == "device"


def test_the_clock_of_the_host_counts_where_it_is_asked_for():
    watch, _ = warm(MadeUpQueue(0.0), clock="host")
    watch.take()
    assert watch.main() == [1.0]
    assert watch.figures()["clock"] == "host"


def test_a_cpu_has_only_the_time_of_a_step_by_itself():
    watch, _ = warm(None)
    watch.take()
    shown = watch.figures()
    assert watch.main() == watch.times["wall"]
    assert shown["clock"] == "wall"
    assert "host_p50" not in shown


def test_a_pause_that_was_too_short_is_made_longer():
    queue = MadeUpQueue(0.0)
    watch, _ = warm(queue)
    queue.needed_ms = 1.5 * watch.busy_ms
    watch.take()
    assert watch.main() == [3.0]
    assert watch.late == 0
    assert queue.pauses[-1] == 2.0 * queue.pauses[-2]


def test_a_step_that_stays_late_is_counted():
    queue = MadeUpQueue(0.0)
    watch, _ = warm(queue)
    queue.needed_ms = float("inf")
    watch.take()
    assert watch.figures()["late"] == 1
    assert watch.figures()["device_p50"] == 9.0


def test_a_step_that_waits_for_the_device_is_marked():
    watch, _ = warm(MadeUpQueue(float("inf")))
    watch.take()
    assert watch.waits
    assert watch.figures()["device_p50"] == 9.0


def test_a_host_that_waits_has_no_time_of_its_own():
    watch, _ = warm(MadeUpQueue(float("inf")))
    watch.take()
    assert "host_p50" not in watch.figures()


def test_no_long_pause_is_spent_on_a_step_that_waits():
    queue = MadeUpQueue(float("inf"))
    watch, _ = warm(queue)
    watch.take()
    assert queue.pauses[-1] == timing.SHORT_MS


def test_the_pause_is_longer_than_a_step_by_itself(monkeypatch):
    monkeypatch.setattr(timing, "wall_ms", lambda step, device: 40.0)
    watch, _ = warm(MadeUpQueue(0.0))
    assert watch.busy_ms == 85.0


class MadeUpGpu:
    """A device and a host whose times are simulated, in seconds.

    A step takes the host `host_s` to hand over and the device `device_s` to run.
    """

    def __init__(self, monkeypatch, host_s, device_s):
        self.now = self.free = 0.0
        self.host_s, self.device_s = host_s, device_s
        for name in ("Event", "synchronize", "_sleep"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def Event(self, enable_timing):
        assert enable_timing
        return MadeUpEvent(self)

    def run(self, seconds):
        self.free = max(self.free, self.now) + seconds

    def synchronize(self):
        self.now = max(self.now, self.free)

    def _sleep(self, cycles):
        self.run(cycles / 2e9)

    def step(self):
        self.now += self.host_s
        self.run(self.device_s)


class MadeUpEvent:
    """A point in the queue of the device."""

    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.at = max(self.gpu.free, self.gpu.now)

    def query(self):
        return self.gpu.now >= self.at

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_a_pause_hides_the_host_from_the_time_of_the_device(monkeypatch):
    gpu = MadeUpGpu(monkeypatch, host_s=0.007, device_s=0.002)
    seen = timing.Queue().timed(gpu.step, busy_ms=20.0)
    assert seen.device == pytest.approx(2.0)
    assert seen.host == pytest.approx(7.0)
    assert not seen.late


def test_a_host_slower_than_the_pause_is_late(monkeypatch):
    gpu = MadeUpGpu(monkeypatch, host_s=0.007, device_s=0.002)
    seen = timing.Queue().timed(gpu.step, busy_ms=3.0)
    assert seen.late
    assert seen.device == pytest.approx(6.0)


def test_a_step_by_itself_takes_host_and_device_time(monkeypatch):
    gpu = MadeUpGpu(monkeypatch, host_s=0.007, device_s=0.002)
    assert timing.wall_ms(gpu.step, "cuda") == pytest.approx(9.0)


def test_everybody_has_a_turn_in_every_round():
    order = list(in_turns(["a", "b", "c"], 6, ""))
    assert [sorted(order[i : i + 3]) for i in range(0, 18, 3)] == [["a", "b", "c"]] * 6


def test_nobody_always_goes_first():
    order = list(in_turns(["a", "b", "c"], 6, ""))
    assert set(order[::3]) == {"a", "b", "c"}


def test_nobody_always_comes_after_the_same_one():
    order = list(in_turns(["a", "b", "c"], 6, ""))
    rounds = [order[i : i + 3] for i in range(0, 18, 3)]
    pairs = {(turn[i], turn[i + 1]) for turn in rounds for i in range(2)}
    assert {("a", "b"), ("b", "a")} <= pairs


def test_a_ratio_is_taken_within_a_turn():
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0


def test_the_bound_of_equal_values_is_that_value():
    assert upper_bound([1.25] * 7) == 1.25


def test_the_bound_lies_above_the_median():
    values = [1.0 + i / 100 for i in range(21)]
    assert statistics.median(values) < upper_bound(values) < max(values)


def test_the_bound_is_the_same_every_time():
    values = [1.0, 1.5, 1.2, 1.1, 1.05]
    assert upper_bound(values) == upper_bound(values)


def test_the_bound_holds_in_nineteen_of_twenty_draws():
    draws = torch.Generator().manual_seed(1)
    held = 0
    for _ in range(200):
        values = torch.randn(25, generator=draws).tolist()
        held += upper_bound(values, draws=200) >= 0.0
    # Within three deviations of 0.95 for 200 draws.
    assert held / 200 == pytest.approx(0.95, abs=0.05)


def test_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(timing, "wall_ms", lambda step, device: 4.0)
    assert timing.bytes_per_ms("cpu", None, size=1024) == 512.0
