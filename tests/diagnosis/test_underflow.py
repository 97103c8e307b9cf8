"""What a scale loses, as the samples of a run file tell it."""

import pytest

from gradscale.core.exponent_histogram import Histogram
from gradscale.core.records import Verdict
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


SINKING = sample({-24: 300, -23: 200, -22: 100, 0: 1}, zeros=300)


def test_a_tensor_of_zeros_comes_before_the_one_that_loses_most(tmp_path):
    seen = {"half": sample({0: 5}, below=5), "first": sample({}, zeros=20)}
    table = written(tmp_path / "run.gs", seen)
    assert [lost.tensor for lost in table.tensors] == ["first", "half"]
    # Nothing else sinks, so its zeros are true.
    assert (table.tensors[0].empty, table.tensors[0].lost) == (True, 0.0)


def test_zeros_that_backward_seems_to_have_flushed_are_lost(tmp_path):
    table = written(tmp_path / "run.gs", {"w": SINKING})
    assert (table.whole.flushed, table.whole.lost) == (300 / 901, 300 / 901)
    assert table.whole.at[8] == 0.0


def test_they_stay_lost_at_a_lower_scale(tmp_path):
    at = written(tmp_path / "run.gs", {"w": SINKING}).whole.at
    assert (at[-4], at[-8]) == (900 / 901, 900 / 901)


def test_zeros_that_are_true_are_not_lost(tmp_path):
    seen = {"w": sample({-2: 300, 0: 200}, zeros=4000)}
    table = written(tmp_path / "run.gs", seen)
    assert (table.whole.flushed, table.whole.lost, table.whole.at[8]) == (0.0, 0.0, 0.0)
    assert table.advice == ("S = 2^0 loses no element; none overflows up to 2^15")


def test_what_appears_of_a_tensor_of_zeros_at_a_higher_scale_is_not_told(tmp_path):
    table = written(tmp_path / "run.gs", {"w": SINKING, "first": sample({}, zeros=99)})
    first, other = table.tensors
    assert (first.tensor, first.lost, first.at) == ("first", 1.0, {-8: 1.0, -4: 1.0})
    assert set(other.at) == {-8, -4, 4, 8}
    assert set(table.whole.at) == {-8, -4}
    assert table.whole.lost == 399 / 1000
    assert table.advice == (
        "about 40 % of the elements are lost at S = 2^0: raise it to 2^13; the "
        "effect on the all-zero tensors is unknown"
    )


def test_a_scale_that_cannot_be_raised_is_not_to_be(tmp_path):
    seen = {"w": sample({0: 50, 13: 1}, below=49)}
    assert written(tmp_path / "run.gs", seen).advice == (
        "about 49 % of the elements are lost at S = 2^0, but a higher scale would "
        "overflow: keep the layers with the largest gradients in float32, or train in "
        "bfloat16"
    )


def test_zeros_throughout_tell_nothing(tmp_path):
    table = written(tmp_path / "run.gs", {"w": sample({}, zeros=9)})
    assert table.advice == "S = 2^0: every element is 0, so no scale can be recommended"


def test_layers_that_get_only_zeros_are_found(tmp_path):
    with RunWriter(tmp_path / "run.gs") as writer:
        for step in range(1, 301):
            writer.step(step, 1.0, True, "GS000", amax=1.0)
            if step % 100 == 0:
                seen = {"w": SINKING, "first": sample({}, zeros=99)}
                writer.samples(step, seen)
    [finding] = diagnosed(tmp_path / "run.gs").findings
    assert (finding.code, finding.since, finding.step) == ("GS209", 100, 300)


def test_gradients_of_activations_are_not_added(tmp_path):
    seen = {"w": sample({0: 9}), "block (output)": sample({0: 9}, below=90)}
    table = written(tmp_path / "run.gs", seen)
    assert [lost.tensor for lost in table.tensors] == ["w"]


def test_the_table_is_of_the_last_step_that_was_finite(tmp_path):
    well, sick = {"w": sample({0: 9})}, {"w": sample({0: 9}, nonfinite=1)}
    table = written(tmp_path / "run.gs", well, well, sick)
    assert (table.step, table.samples) == (2, 3)


def test_a_scale_of_1_that_loses_half_is_found(tmp_path):
    runs.write_sampled(tmp_path / "run.gs", [1.0] * 400)
    diagnosis = diagnosed(tmp_path / "run.gs")
    [finding] = diagnosis.findings
    assert (finding.code, finding.since, finding.step) == ("GS209", 100, 300)
    assert diagnosis.verdicts[Verdict.UNDERFLOW] == 4
    assert diagnosis.underflow.advice == (
        "about 56 % of the elements are lost at S = 2^0: raise it to 2^22, where "
        "about 2.0 % would be lost"
    )


@pytest.mark.parametrize("scale", [2.0**12, 2.0**16])
def test_a_scale_that_fits_is_no_finding(tmp_path, scale):
    runs.write_sampled(tmp_path / "run.gs", [scale] * 400)
    diagnosis = diagnosed(tmp_path / "run.gs")
    assert diagnosis.findings == ()
