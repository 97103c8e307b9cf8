"""A run that is killed at any moment leaves a file that can be read."""

import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from gradscale.runfile import open_run
from tests.runfile import killed

# Each journal, pace and reader at least twice, and four that live long.
KILLS = 28
# The moments differ from run to run of the suite on purpose; a failure names its own.
MOMENTS = random.Random()


class Plan(NamedTuple):
    """One process and how it ends: with steady commits, most kills fall into one."""

    number: int
    journal: str
    pace: float
    reader: bool
    seconds: float


class Left(NamedTuple):
    """What a killed process left behind."""

    plan: Plan
    torn: list[int]
    gaps: list[int]
    parts: list[int]
    lost_seconds: float
    stood_still: float
    rows: int
    state: str


def plans():
    for number in range(KILLS):
        # Every seventh lives long enough to lose more than a second, if it could.
        seconds = MOMENTS.uniform(*((1.4, 1.8) if number % 7 == 0 else (0.05, 0.4)))
        yield Plan(
            number,
            ["wal", "truncate"][number % 2],
            [0.25, 0.0][number // 2 % 2],
            number % 3 == 0,
            seconds,
        )


def kill(folder: Path, plan: Plan) -> Left:
    path = folder / f"{plan.number}.gs"
    command = [sys.executable, killed.__file__, path, plan.journal, str(plan.pace)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, pipesize=1 << 20)
    try:
        told = process.stdout.read(killed.TOLD.size)
        reader = open_run(path) if plan.reader else None
        until = time.monotonic() + plan.seconds
        while reader is not None and time.monotonic() < until - 0.02:
            reader.tail(reader.last_step - 10)
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    told += process.stdout.read()
    process.stdout.close()
    if reader is not None:
        reader.close()
    whole = len(told) // killed.TOLD.size * killed.TOLD.size
    times = [when for _, when in killed.TOLD.iter_unpack(told[:whole])]
    return look(path, plan, times)


def look(path: Path, plan: Plan, times: list[float]) -> Left:
    with open_run(path) as run:
        run.check()
        rows = list(run.steps())
        kept = [
            step for step in run.peak_steps() if run.peaks(step) != killed.peaks(step)
        ]
        sampled = [
            step
            for step in run.sampled_steps()
            if {row.tensor: row.sample for row in run.samples(step)}
            != {
                name: seen._replace(histogram=tuple(seen.histogram))
                for name, seen in killed.samples(step).items()
            }
        ]
        events = [
            event.step for event in run.events() if event.data["step"] != event.step
        ]
        return Left(
            plan,
            torn=[row.step for row in rows if row != killed.expected(row)],
            gaps=[row.step for place, row in enumerate(rows, 1) if row.step != place],
            parts=kept + sampled + events,
            lost_seconds=times[-1] - (rows[-1].time if rows else times[0]),
            stood_still=max((b - a for a, b in pairwise(times)), default=0.0),
            rows=len(rows),
            state=run.meta["end"]["state"],
        )


@pytest.fixture(scope="module")
def left():
    # In memory where that is possible: what a busy disk takes to answer a commit is
    # not the writer's, and to a process that is killed the two are alike.
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        ThreadPoolExecutor(2) as pool,
    ):
        return list(pool.map(lambda plan: kill(Path(folder), plan), plans()))


def test_every_file_opens_and_is_whole(left):
    # Each of them was opened and checked by SQLite on the way here.
    assert [one.plan.number for one in left] == list(range(KILLS))


def test_no_row_of_a_step_is_torn(left):
    assert [one for one in left if one.torn] == []


def test_no_step_is_missing_before_the_last_one(left):
    assert [one for one in left if one.gaps] == []


def test_no_peak_sample_or_event_is_torn(left):
    assert [one for one in left if one.parts] == []


def test_at_most_the_last_second_is_lost(left):
    # A process that was not given the machine did no step in that time.
    assert [one for one in left if one.lost_seconds - one.stood_still > 1.0] == []


def test_the_rate_was_thousands_of_steps_a_second(left):
    # The fastest: a busy machine leaves some of them little time.
    assert max(one.rows / one.plan.seconds for one in left) > 2000


def test_a_killed_run_is_said_to_be_running(left):
    assert {one.state for one in left} == {"running"}
