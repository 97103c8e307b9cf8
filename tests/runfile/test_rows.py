"""Values come back from the file as they were handed over."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscale.runfile import BINS, LOWEST_EXPONENT, RunWriter, TensorSample, open_run
from gradscale.runfile.rows import packed, unpacked

NUMBERS = [None, 0.0, 1.5, 5e-324, 1.7976931348623157e308, math.inf, -math.inf]


def written(path, fill):
    """Return an open run after `fill` has handed rows over."""
    with RunWriter(path) as writer:
        fill(writer)
    return open_run(path)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_comes_back_bit_for_bit(tmp_path, number):
    def fill(writer):
        writer.step(1, 1024.0, True, "GS000", norm=number, amax=number, loss=number)

    with written(tmp_path / "run.gs", fill) as run:
        [row] = run.steps()
    assert [repr(value) for value in row[5:]] == [repr(number)] * 3


def test_nan_is_told_from_a_value_that_is_not_known(tmp_path):
    def fill(writer):
        writer.step(1, 1024.0, False, "GS203", norm=math.nan, amax=None, loss=math.nan)

    with written(tmp_path / "run.gs", fill) as run:
        [row] = run.steps()
    assert math.isnan(row.norm)
    assert row.amax is None
    assert math.isnan(row.loss)


def test_a_row_has_the_types_it_was_given(tmp_path):
    with written(
        tmp_path / "run.gs", lambda writer: writer.step(7, 65536.0, False, "GS201")
    ) as run:
        [row] = run.steps()
    assert (row.step, row.scale, row.applied, row.verdict) == (
        7,
        65536.0,
        False,
        "GS201",
    )
    assert (type(row.scale), type(row.applied)) == (float, bool)


def test_peaks_that_are_not_finite_come_back(tmp_path):
    peaks = {"a": math.inf, "b": math.nan, "c": 0.0, "d": 65504.0}
    with written(tmp_path / "run.gs", lambda writer: writer.peaks(3, peaks)) as run:
        assert repr(run.peaks(3)) == repr(peaks)
        assert run.peak_steps() == [3]
        assert run.tensors == ("a", "b", "c", "d")


def test_peaks_of_a_step_that_has_none_are_empty(tmp_path):
    with written(tmp_path / "run.gs", lambda writer: None) as run:
        assert run.peaks(3) == {}


def test_a_sample_comes_back(tmp_path):
    histogram = tuple(range(BINS))
    sample = TensorSample(800, 5, 45, histogram, below=3, above=2, nonfinite=10)
    with written(
        tmp_path / "run.gs", lambda writer: writer.samples(9, {"head.weight": sample})
    ) as run:
        assert list(run.samples()) == [(9, "head.weight", sample)]
        assert list(run.samples(9)) == [(9, "head.weight", sample)]
        assert list(run.samples(8)) == []


def test_an_event_comes_back(tmp_path):
    data = {"share": math.inf, "names": ["a", "ß"], "none": None}

    def fill(writer):
        writer.event("GS201", step=4, where="head", data=data)
        writer.event("GS001")

    with written(tmp_path / "run.gs", fill) as run:
        first, second = run.events()
    assert (first.id, first.step, first.code, first.where) == (1, 4, "GS201", "head")
    assert first.data == data
    assert (second.step, second.where, second.data) == (None, None, None)


def test_data_that_json_does_not_know_becomes_text(tmp_path):
    with written(
        tmp_path / "run.gs", lambda writer: writer.event("GS201", data={"at": {1}})
    ) as run:
        [event] = run.events()
    assert event.data == {"at": "{1}"}


@given(st.lists(st.integers(0, 2**64 - 1), min_size=BINS, max_size=BINS))
def test_a_histogram_unpacks_to_what_was_packed(counts):
    assert unpacked(packed(counts)) == tuple(counts)


@pytest.mark.parametrize(
    ("largest", "width"), [(255, 1), (256, 2), (65536, 4), (2**32, 8)]
)
def test_a_count_takes_as_many_bytes_as_the_largest_needs(largest, width):
    assert len(packed([0] * 10 + [largest, 1] + [0] * 28)) == 2 + 2 * width


def test_an_empty_histogram_takes_no_bytes():
    assert packed([0] * BINS) == b""


def test_the_bins_are_the_exponents_of_f16():
    assert math.frexp(2.0**-24)[1] - 1 == LOWEST_EXPONENT
    assert math.frexp(65504.0)[1] - 1 == LOWEST_EXPONENT + BINS - 1
