"""What a scale loses, as the samples of a run file tell it."""

import pytest

from gradscale.core.underflow import Histogram
from gradscale.core.verdicts import Verdict
from gradscale.diagnosis import diagnose_run
from gradscale.diagnosis.underflow import lost_at
from gradscale.runfile import BINS, RunWriter, TensorSample, open_run
from tests.diagnosis import runs


def diagnosed(path):
    with open_run(path) as run:
        return diagnose_run(run)


def sample(bins, zeros=0, below=0, nonfinite=0):
    """Return a sample with counts by exponent."""
    counts = [bins.get(place - 24, 0) for place in range(BINS)]
    total = zeros + below + nonfinite + sum(counts)
    low = sum(counts[:10])
    return TensorSample(total, zeros, low, counts, below, 0, nonfinite)


def written(path, *samples, scales=None):
    """Write one sampled step for each mapping of samples."""
    with RunWriter(path) as writer:
        for step, seen in enumerate(samples, start=1):
            scale = scales[step - 1] if scales else 1.0
            writer.step(step, scale, True, "GS000", amax=1.0)
            writer.samples(step, seen)
    return diagnosed(path).underflow


def test_a_run_without_samples_has_no_table(tmp_path):
    runs.write(tmp_path / "run.gs", runs.saw_tooth(50))
    assert diagnosed(tmp_path / "run.gs").underflow is None


def test_shares_are_exact(tmp_path):
    seen = {"w": sample({-24: 2, -15: 1, -14: 1, 0: 4}, zeros=10, below=8)}
    lost = written(tmp_path / "run.gs", seen).whole
    assert (lost.elements, lost.zeros) == (26, 10 / 26)
    assert (lost.lost, lost.subnormal) == (8 / 16, 3 / 16)


def test_a_lower_scale_loses_what_falls_out_of_the_bins(tmp_path):
    seen = {"w": sample({-24: 2, -21: 1, -20: 3, 0: 4})}
    lost = written(tmp_path / "run.gs", seen).whole
    # 2^-4 times as high: below 2^-25 is what is below 2^-21 now.
    assert (lost.lost, lost.at[-4], lost.at[-8]) == (0.0, 0.2, 0.6)


def test_a_higher_scale_that_overflows_is_none(tmp_path):
    seen = {"w": sample({0: 4, 10: 1})}
    at = written(tmp_path / "run.gs", seen).whole.at
    assert (at[4], at[8]) == (0.0, None)


def test_what_is_below_the_bins_fades_with_a_higher_scale():
    seen = Histogram(1.0, 0, 4, -24, (4, *(0,) * 20, 8, *(0,) * 18), 0, 0)
    assert [lost_at(seen, shift) for shift in (0, 1, 2)] == [0.25, 0.125, 0.0625]


def test_the_tensor_that_loses_most_comes_first(tmp_path):
    seen = {
        "low": sample({0: 9}, below=1),
        "high": sample({0: 5}, below=5),
        "none": sample({0: 10}),
    }
    table = written(tmp_path / "run.gs", seen)
    assert [lost.tensor for lost in table.tensors] == ["high", "low", "none"]
    assert table.whole.lost == 6 / 30


def test_gradients_of_activations_are_not_added(tmp_path):
    seen = {"w": sample({0: 9}), "block (output)": sample({0: 9}, below=90)}
    table = written(tmp_path / "run.gs", seen)
    assert [lost.tensor for lost in table.tensors] == ["w"]


def test_the_table_is_of_the_last_step_that_was_finite(tmp_path):
    well, sick = {"w": sample({0: 9})}, {"w": sample({0: 9}, nonfinite=1)}
    table = written(tmp_path / "run.gs", well, well, sick)
    assert (table.step, table.samples) == (2, 3)


def test_what_backward_flushed_is_told_from_two_scales(tmp_path):
    low = {"w": sample({-24: 800, -23: 1600, -22: 3200, -21: 3700}, zeros=700)}
    high = {"w": sample({-24: 400, -23: 800, -22: 1600, -21: 3200, -20: 3500}, 500)}
    told = written(tmp_path / "run.gs", high, low, scales=[2.0, 1.0]).flushed
    assert (round(told.at_low, 3), round(told.true_zeros, 3)) == (0.04, 0.03)


def test_one_scale_tells_nothing_of_what_was_flushed(tmp_path):
    seen = {"w": sample({0: 9}, zeros=5)}
    assert written(tmp_path / "run.gs", seen, seen).flushed is None


def test_a_scale_of_1_that_loses_half_is_found(tmp_path):
    runs.write_sampled(tmp_path / "run.gs", [1.0] * 400)
    diagnosis = diagnosed(tmp_path / "run.gs")
    [finding] = diagnosis.findings
    assert (finding.code, finding.since, finding.step) == ("GS209", 100, 200)
    assert diagnosis.verdicts[Verdict.UNDERFLOW] == 4
    assert diagnosis.underflow.advice.startswith("raise S to 2^")


@pytest.mark.parametrize("scale", [2.0**12, 2.0**16])
def test_a_scale_that_fits_is_no_finding(tmp_path, scale):
    runs.write_sampled(tmp_path / "run.gs", [scale] * 400)
    diagnosis = diagnosed(tmp_path / "run.gs")
    assert diagnosis.findings == ()
