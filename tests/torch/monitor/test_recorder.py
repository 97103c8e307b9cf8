"""The recorder: which process writes, what it writes, and what it costs."""

import math
import os
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from gradscale.core.policies import DynamicScale
from gradscale.core.records import StepRecord, Verdict
from gradscale.judge.findings import Finding
from gradscale.judge.judge import Judge, Judgement
from gradscale.recording.recorder import Recorder
from gradscale.runfile import TensorSample, open_run
from gradscale.runfile.committer import THREAD
from gradscale.torch.monitor.recorder import process_here

FINE = StepRecord(1, 1024.0, True, True, amax=3.0, grad_norm=2.0, loss=0.5)
BAD = StepRecord(1, 1024.0, False, False, amax=math.inf, calibrated=False)


def recorded(recorder, *records, culprits=(), peaks=None):
    """Let the recorder see records that were judged in order, and close it."""
    judge = Judge()
    for step, record in enumerate(records, start=1):
        record = record._replace(step=step)
        recorder.see(record, judge.see(record, culprits), culprits, peaks)
    recorder.close()


def test_a_step_is_written_as_the_record_has_it(tmp_path):
    recorded(Recorder(tmp_path / "run.gs"), FINE)
    with open_run(tmp_path / "run.gs") as run:
        [row] = run.steps()
    assert row._replace(time=0.0) == (1, 0.0, 1024.0, True, "GS000", 2.0, 3.0, 0.5)


def test_a_step_without_gradients_has_no_largest_magnitude(tmp_path):
    recorded(Recorder(tmp_path / "run.gs"), FINE._replace(read=False, amax=0.0))
    with open_run(tmp_path / "run.gs") as run:
        assert [row.amax for row in run.steps()] == [None]


def test_the_file_is_made_with_the_first_step_and_not_before(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    assert list(tmp_path.iterdir()) == []
    recorded(recorder, FINE)
    assert recorder.path == tmp_path / "run.gs"
    assert recorder.path.exists()


def test_what_is_found_becomes_an_event(tmp_path):
    found = Finding(
        "GS206", "", "head", 1, 1, "it overflowed", "", {}, ("wait",), "more"
    )
    recorder = Recorder(tmp_path / "run.gs")
    recorder.see(BAD, Judgement(Verdict.LOSS_OVERFLOW, (found,)))
    recorder.close()
    with open_run(tmp_path / "run.gs") as run:
        [event] = run.events()
        assert [row.verdict for row in run.steps()] == ["GS206"]
    assert (event.code, event.step, event.where) == ("GS206", 1, "head")
    assert event.data["advice"] == ["wait"]


def test_the_same_culprits_again_are_no_second_event(tmp_path):
    names = [f"layer{n}.weight" for n in range(30)]
    recorded(Recorder(tmp_path / "run.gs"), BAD, BAD, BAD, culprits=names)
    with open_run(tmp_path / "run.gs") as run:
        [event] = run.events()
    assert (event.code, event.step, event.where) == ("GS002", 1, "layer0.weight")
    assert event.data == {"culprits": names[:20], "count": 30}


def test_peaks_and_samples_are_written_under_their_names(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    recorder.see(BAD, Judge().see(BAD), peaks={"a": math.inf, "b": 2.0})
    counted = TensorSample(4, 1, 0, [0] * 40, nonfinite=3)
    recorder.sample(1, {"a": counted})
    recorder.close()
    with open_run(tmp_path / "run.gs") as run:
        assert run.peaks(1) == {"a": math.inf, "b": 2.0}
        [row] = run.samples()
    assert (row.tensor, row.sample.zeros, row.sample.nonfinite) == ("a", 1, 3)


def test_meta_tells_versions_policy_names_and_what_was_given(tmp_path):
    recorder = Recorder(
        tmp_path / "run.gs",
        policy=DynamicScale(growth_interval=7),
        names=lambda: ["a", "b"],
        meta={"why": "a test"},
    )
    recorded(recorder, FINE)
    with open_run(tmp_path / "run.gs") as run:
        meta = run.meta
    assert meta["policy"]["kind"] == "DynamicScale"
    assert meta["policy"]["growth_interval"] == 7
    assert meta["parameters"] == ["a", "b"]
    assert meta["frameworks"]["torch"] == torch.__version__
    assert meta["why"] == "a test"
    assert meta["end"]["state"] == "closed"


def test_only_rank_0_writes(tmp_path):
    recorder = Recorder(tmp_path / "run.gs", rank=1)
    recorded(recorder, FINE)
    assert recorder.path is None
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_write_files_of_their_own_on_request(tmp_path):
    for rank in (0, 3):
        recorded(Recorder(tmp_path / "run.gs", rank=rank, every_rank=True), FINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.gs",
        "run.rank3.gs",
    ]
    with open_run(tmp_path / "run.rank3.gs") as run:
        assert run.meta["rank"] == 3


def test_the_rank_of_a_launcher_counts_before_torch_knows_one(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert process_here().rank == 3
    monkeypatch.setenv("RANK", "")
    assert process_here().rank == 0


class _Recording(Dataset):
    """A data set whose workers try to record."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 2

    def __getitem__(self, index):
        recorder = Recorder(self.folder / f"{index}.gs", process=process_here)
        recorder.see(FINE, Judge().see(FINE))
        return int(recorder.path is None)


def test_a_data_loader_worker_never_writes(tmp_path):
    loader = DataLoader(_Recording(tmp_path), num_workers=1)
    assert [int(batch) for batch in loader] == [1, 1]
    assert list(tmp_path.iterdir()) == []


# Python 3.12 warns of every fork of a process with threads; torch has some.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_process_does_not_write_for_its_parent(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    child = os.fork()
    if child == 0:
        try:
            recorder.see(FINE, Judge().see(FINE))
            recorder.close()
            os._exit(0 if recorder.path is None else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []


def test_who_asks_to_be_told_is_told_instead_of_raised_at(tmp_path):
    told = []
    missing = tmp_path / "none" / "run.gs"
    recorded(Recorder(missing, failed=told.append), FINE)
    assert [error.code for error in told] == ["GS308"]


def test_what_is_on_its_way_is_handed_over_before_the_end(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    recorder.before_end(lambda: recorder.see(FINE, Judge().see(FINE)))
    recorder.close()
    recorder.close()
    with open_run(tmp_path / "run.gs") as run:
        assert [row.step for row in run.steps()] == [1]


def test_what_happens_before_the_first_step_is_written_with_it(tmp_path):
    recorder = Recorder(tmp_path / "run.gs")
    recorder.event("GS301", data={"what": "it was resumed"})
    assert list(tmp_path.iterdir()) == []
    recorded(recorder, FINE)
    with open_run(tmp_path / "run.gs") as run:
        [event] = run.events()
    assert (event.code, event.data) == ("GS301", {"what": "it was resumed"})


def test_a_recorder_that_is_let_go_of_in_the_writing_thread_is_closed_elsewhere(
    tmp_path,
):
    # The collector runs in any thread, also in the one that close() waits for.
    recorder = Recorder(tmp_path / "run.gs")
    assert recorder.begin()
    recorder.writer.step(1, 8.0, True, "GS000")
    closed = threading.Event()
    recorder.before_end(closed.set)
    committer, threads = recorder.writer._committer, []
    commit = committer._commit

    def commit_and_collect(*arguments):
        if not threads:
            threads.append(threading.current_thread().name)
            recorder.let_go()
        return commit(*arguments)

    committer._commit = commit_and_collect
    assert closed.wait(30)
    for thread in threading.enumerate():
        if thread.name == "gradscale-close":
            thread.join()
    assert threads == [THREAD]
    with open_run(tmp_path / "run.gs") as run:
        assert (run.last_step, run.meta["end"]["state"]) == (1, "closed")
