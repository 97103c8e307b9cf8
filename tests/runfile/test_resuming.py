"""A resumed run goes on in the same file."""

import sqlite3

import pytest

from gradscale import StateError
from gradscale.runfile import RunWriter, TensorSample, open_run

SAMPLE = TensorSample(10, 0, 0, [0] * 39 + [10])


def record(path, steps, scale, **options):
    """Record steps with peaks, samples and an event each."""
    with RunWriter(path, **options) as writer:
        for step in steps:
            writer.step(step, scale, True, "GS000")
            writer.peaks(step, {"a": scale})
            writer.samples(step, {"a": SAMPLE})
            writer.event("GS201", step=step, data=scale)
            writer.flush()


def test_steps_that_are_taken_again_replace_the_old_ones_from_there_on(tmp_path):
    file = tmp_path / "run.gs"
    record(file, range(1, 11), 8.0)
    record(file, range(6, 8), 4.0, resume=True)
    with open_run(file) as run:
        kept = dict.fromkeys(range(1, 6), 8.0) | {6: 4.0, 7: 4.0}
        assert {row.step: row.scale for row in run.steps()} == kept
        assert {step: run.peaks(step)["a"] for step in run.peak_steps()} == kept
        assert run.sampled_steps() == list(kept)
        assert {event.step: event.data for event in run.events()} == kept


def test_a_step_back_in_the_same_process_does_the_same(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in [1, 2, 3, 4, 5, 3, 4]:
            writer.step(step, 8.0, True, "GS000", loss=float(step))
        writer.flush()
        writer.step(2, 4.0, True, "GS000")
    with open_run(tmp_path / "run.gs") as run:
        assert [(row.step, row.scale) for row in run.steps()] == [(1, 8.0), (2, 4.0)]


def test_the_last_step_taken_again_takes_its_details_with_it(tmp_path):
    file = tmp_path / "run.gs"
    record(file, range(1, 4), 8.0)
    with RunWriter(file, resume=True) as writer:
        writer.step(3, 4.0, True, "GS000")
    with open_run(file) as run:
        assert [row.scale for row in run.steps()] == [8.0, 8.0, 4.0]
        assert run.peak_steps() == run.sampled_steps() == [1, 2]
        assert [event.step for event in run.events()] == [1, 2]


def test_events_without_a_step_stay(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.step(1, 8.0, True, "GS000")
        writer.event("GS301")
        writer.step(1, 4.0, True, "GS000")
    with open_run(tmp_path / "run.gs") as run:
        assert [event.code for event in run.events()] == ["GS301"]


def test_names_keep_their_ids(tmp_path):
    file = tmp_path / "run.gs"
    record(file, [1], 8.0)
    with RunWriter(file, resume=True) as writer:
        writer.peaks(2, {"b": 1.0, "a": 2.0})
    with open_run(file) as run:
        assert run.tensors == ("a", "b")
        assert run.peaks(1) == {"a": 8.0}
        assert run.peaks(2) == {"a": 2.0, "b": 1.0}


def test_meta_tells_of_both_parts(tmp_path):
    file = tmp_path / "run.gs"
    record(file, range(1, 4), 8.0, meta={"policy": "old", "kept": 1})
    with open_run(file) as run:
        start = run.meta["start"]
    record(file, [], 8.0, resume=True, meta={"policy": "new"})
    with open_run(file) as run:
        assert (run.meta["policy"], run.meta["kept"]) == ("new", 1)
        assert run.meta["start"] == start
        [resumed] = run.meta["resumed"]
    assert resumed["after"] == 3
    assert resumed["time"] > start


def test_to_resume_without_a_file_makes_one(tmp_path):
    record(tmp_path / "run.gs", [1], 8.0, resume=True)
    with open_run(tmp_path / "run.gs") as run:
        assert run.last_step == 1
        assert "resumed" not in run.meta


def test_a_file_of_something_else_is_not_gone_on_with(tmp_path):
    (tmp_path / "run.gs").write_bytes(b"x" * 5000)
    with pytest.raises(StateError, match="GS306"):
        RunWriter(tmp_path / "run.gs", resume=True)
    assert (tmp_path / "run.gs").read_bytes() == b"x" * 5000


def test_a_file_of_a_newer_version_is_not_gone_on_with(tmp_path):
    record(tmp_path / "run.gs", [1], 8.0)
    file = sqlite3.connect(tmp_path / "run.gs")
    file.execute("PRAGMA user_version = 2")
    file.close()
    with pytest.raises(StateError, match="GS307"):
        RunWriter(tmp_path / "run.gs", resume=True)
