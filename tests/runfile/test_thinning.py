"""A long run does not make a large file."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale.runfile import RunWriter, TensorSample, inserts, open_run, thinning
from gradscale.runfile.thinning import Thinning, due, limit

SAMPLE = TensorSample(10**6, 0, 0, [0] * 20 + [50_000] * 20)


def thinned(steps, most):
    kept = Thinning()
    for step in steps:
        kept.add(step, most)
    return kept.steps


def test_no_more_steps_are_kept_than_the_limit():
    assert len(thinned(range(100, 100_001, 100), 50)) == 50


@given(st.sets(st.integers(1, 10**6)), st.integers(3, 20))
def test_the_first_and_the_newest_step_are_kept(steps, most):
    kept = thinned(sorted(steps), most)
    assert kept[:1] == sorted(steps)[:1]
    assert kept[-1:] == sorted(steps)[-1:]
    assert len(kept) == min(len(steps), most)


def test_gaps_grow_with_age_and_with_nothing_else():
    kept = thinned(range(100, 1_000_001, 100), 300)
    ratios = [
        (after - before) / (kept[-1] - before)
        for before, after in pairwise(kept)
        if kept[-1] - before > 10_000
    ]
    assert max(ratios) < 0.1


def test_the_newest_steps_are_all_kept():
    assert thinned(range(1, 10_001), 300)[-20:] == list(range(9981, 10_001))


def test_a_lonely_step_and_the_ends_of_a_series_are_kept():
    trouble = [5000, *range(20_000, 21_000), 50_000]
    kept = thinned(trouble, 20)
    assert {5000, 20_000, 20_999, 50_000} <= set(kept)


def test_what_is_dropped_is_told():
    kept, dropped = Thinning(), []
    for step in range(1, 101):
        dropped += kept.add(step, 10)
    assert sorted(dropped + kept.steps) == list(range(1, 101))


def test_a_step_is_kept_once():
    assert thinned([1, 2, 2, 1, 3], 10) == [1, 2, 3]


@pytest.mark.parametrize(
    ("tensors", "steps"), [(0, 1000), (100, 1000), (1000, 300), (10**5, 8)]
)
def test_the_limit_follows_from_the_number_of_tensors(tensors, steps):
    assert limit(tensors) == steps


def test_the_first_steps_and_every_hundredth_are_due():
    assert [step for step in range(1001) if due(step, 100)] == [
        0, 1, 2, 4, 8, 16, 32, 64, *range(100, 1001, 100)
    ]  # fmt: skip


# --- in the file ----------------------------------------------------------------------


def test_the_file_keeps_the_details_of_few_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(thinning, "ROWS", 40)
    with RunWriter(tmp_path / "run.gs", sample_every=10) as writer:
        for step in range(1, 2001):
            writer.step(step, 65536.0, True, "GS000")
            if writer.due(step):
                writer.peaks(step, {"a": 1.0, "b": 2.0})
                writer.samples(step, {"a": SAMPLE, "b": SAMPLE})
                writer.flush()
            if step in (501, 502):
                writer.peaks(step, {"a": 1.0})
    with open_run(tmp_path / "run.gs") as run:
        assert run.last_step == 2000
        assert len(run.sampled_steps()) == 20
        # Of a step, peaks and samples stay or go together.
        assert set(run.peak_steps()) == {501, 502, *run.sampled_steps()}
        assert run.sampled_steps()[-3:] == [1980, 1990, 2000]


def test_the_limit_holds_over_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setattr(thinning, "ROWS", 20)
    for start in range(1, 500, 100):
        with RunWriter(tmp_path / "run.gs", resume=True) as writer:
            for step in range(start + 10, start + 40):
                writer.peaks(step, {"a": 1.0})
                writer.flush()
    with open_run(tmp_path / "run.gs") as run:
        # Sampled steps (16, 32, ...) and others have a limit each.
        assert len([step for step in run.peak_steps() if not due(step, 100)]) == 20


def test_of_many_events_the_first_and_the_newest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(inserts, "EVENTS_KEPT", 5)
    with RunWriter(tmp_path / "run.gs") as writer:
        writer.event("GS001", step=1)
        for step in range(1, 51):
            writer.event("GS201", step=step)
    with open_run(tmp_path / "run.gs") as run:
        events = list(run.events())
        assert run.meta["events_dropped"] == {"GS201": 40}
    assert [event.step for event in events if event.code == "GS201"] == [
        *range(1, 6),
        *range(46, 51),
    ]
    assert [event.step for event in events if event.code == "GS001"] == [1]


def test_a_million_steps_of_a_thousand_tensors_fit_into_200_megabytes(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 20_001):
            writer.step(
                step, 65536.0, True, "GS000", 1.1 / step, 2.2 / step, 3.3 / step
            )
        writer.flush()
        steps = (tmp_path / "run.gs-wal").stat().st_size / 20_000
    base = (tmp_path / "run.gs").stat().st_size
    with RunWriter(tmp_path / "run.gs", resume=True) as writer:
        for step in range(100, 1100, 100):
            writer.samples(step, {str(name): SAMPLE for name in range(1000)})
            writer.peaks(step, {str(name): name / 3 for name in range(1000)})
            writer.flush()
    detail = ((tmp_path / "run.gs").stat().st_size - base) / 10
    # Both kinds of detailed steps at their limit, each with peaks and samples.
    assert 1e6 * steps + 2 * limit(1000) * detail < 200e6
