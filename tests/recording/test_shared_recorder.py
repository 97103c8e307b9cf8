"""Several recorders of one process write one run file, in the order of updates."""

import os

import pytest

from gradscale import StepRecord
from gradscale.diagnosis.judged_run import JudgedRun
from gradscale.judge.judge import Judge
from gradscale.recording.shared_recorder import (
    LONGEST_WAIT,
    SharedFiles,
    SharedRecorder,
)
from gradscale.runfile import open_run


class Scaler:
    """Makes updates whose rows arrive when `arrive` is called."""

    def __init__(self, files, path, scale, **options):
        self.recorder = SharedRecorder(files, path, rank=0, quiet=True, **options)
        self.recorder.before_end(self.arrive)
        self._judge, self._scale = Judge(), scale
        self._updates = self._arrived = 0

    def update(self, times=1):
        for _ in range(times):
            self._updates += 1
            self.recorder.begin_update()

    def replay(self, times=1):
        """Take steps without an update on the host, as a graph does."""
        self._updates += times

    def arrive(self):
        while self._arrived < self._updates:
            self._arrived += 1
            record = StepRecord(self._arrived, self._scale, True, True)
            record = self.recorder.numbered(record)
            self.recorder.see(record, self._judge.see(record))


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a scaler, and one that closes and reads the file."""
    files, path = SharedFiles(), tmp_path / "run.gs"

    def read():
        files.close()
        with open_run(path) as run:
            return [(row.step, row.scale) for row in run.steps()], run.meta

    yield lambda scale, **options: Scaler(files, path, scale, **options), read
    files.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_scaler_that_begins_anew_for_a_resumed_optimizer_says_so(
    make, tmp_path, resumed
):
    class Optimizer:
        pass

    scaler, read = make
    scaler(8.0).update()
    second = scaler(32.0)
    second.update()
    second.recorder.trains([Optimizer()], resumed=resumed)
    read()
    with open_run(tmp_path / "run.gs") as run:
        [event] = run.events()
    assert (event.code, event.data["same_optimizer"]) == ("GS118", resumed)


def test_rows_that_arrive_late_are_written_in_the_order_of_updates(make):
    scaler, read = make
    first, second = scaler(8.0), scaler(32.0)
    for _ in range(3):
        first.update()
        second.update()
    second.arrive()
    first.arrive()
    assert read()[0] == list(enumerate([8.0, 32.0] * 3, start=1))


def test_rows_of_a_closed_recorder_that_wait_for_another_are_written(make):
    scaler, read = make
    first, second = scaler(8.0), scaler(32.0)
    first.update(2)
    second.update(2)
    second.recorder.close()
    first.arrive()
    assert read()[0] == list(enumerate([8.0, 8.0, 32.0, 32.0], start=1))


def test_a_finalizer_during_the_close_of_a_recorder_loses_no_row(make):
    new, read = make
    scaler = new(4.0)
    scaler.update(times=3)

    def arrive():
        # As when garbage is collected in the middle.
        scaler.recorder.let_go()
        scaler.arrive()

    scaler.recorder.before_end(arrive)
    scaler.recorder.close()
    rows, _ = read()
    assert rows == [(1, 4.0), (2, 4.0), (3, 4.0)]


def test_steps_that_a_graph_replays_are_numbered_as_they_arrive(make):
    scaler, read = make
    only = scaler(8.0)
    only.update()
    only.replay(3)
    only.update()
    only.arrive()
    only.update()
    only.arrive()
    assert [step for step, _ in read()[0]] == [1, 2, 3, 4, 5, 6]


def test_updates_whose_rows_never_arrive_hold_up_few_rows(make):
    scaler, read = make
    first, second = scaler(8.0), scaler(32.0)
    first.update()
    # Dropped, for instance by a checkpoint that is loaded.
    first.recorder.before_end(lambda: None)
    for _ in range(2 * LONGEST_WAIT):
        second.update()
        second.arrive()
    assert second.recorder.writer.flush()
    with open_run(second.recorder.path) as run:
        assert len(list(run.steps())) > LONGEST_WAIT
    assert [step for step, _ in read()[0]] == list(range(2, 2 * LONGEST_WAIT + 2))


def test_the_first_step_of_a_resumed_run_has_its_number(make):
    scaler, read = make
    only = scaler(8.0)
    only.recorder.begin_update(1000)
    only.replay()
    only.arrive()
    assert read()[0] == [(1001, 8.0)]


def test_the_parameters_of_all_scalers_are_listed_once(make):
    scaler, read = make
    for names in (["g.weight", "bias"], ["d.weight", "bias"]):
        each = scaler(8.0, names=lambda names=names: names)
        each.update()
        each.recorder.close()
    assert read()[1]["parameters"] == ["g.weight", "bias", "d.weight"]


def test_a_scaler_after_the_recording_has_stopped_writes_another_file(make):
    scaler, _ = make
    first = scaler(8.0)
    first.update()
    first.recorder.close()
    first.recorder.writer.close()
    second = scaler(8.0)
    second.update()
    assert second.recorder.path.name == "run.2.gs"


def test_a_forked_process_does_not_write_into_the_file_of_its_parent(make):
    scaler, read = make
    first = scaler(8.0)
    first.update()
    child = os.fork()
    if child == 0:
        first.update()
        first.arrive()
        first.recorder.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    first.update()
    first.arrive()
    assert [step for step, _ in read()[0]] == [1, 2]


def test_several_scalers_are_judged_live_as_the_file_is(tmp_path):
    files, path = SharedFiles(), tmp_path / "run.gs"
    scalers = [SharedRecorder(files, path, rank=0, quiet=True) for _ in range(2)]
    judges = [Judge(), Judge()]
    for step in range(1, 31):
        # From step 11 on the first one rests, and the second one fails.
        lost = step > 10
        for number, recorder in list(enumerate(scalers))[lost:]:
            recorder.begin_update()
            loss = float("nan") if lost else 1.0
            own = StepRecord(
                step, 8.0 + 24.0 * number, not lost, not lost, not lost, loss=loss
            )
            record = recorder.numbered(own)
            recorder.see(record, judges[number].see(record))
    files.close()
    with open_run(path) as run:
        judged = JudgedRun(run)
        judged.read_events()
        for row in run.steps():
            judged.see(row)
        live = [
            (event.code, event.step)
            for event in run.events()
            if "evidence" in event.data
        ]
    found = [(finding.code, finding.step) for finding in judged.findings]
    assert live == found
    assert [code for code, _ in live] == ["GS203"]
