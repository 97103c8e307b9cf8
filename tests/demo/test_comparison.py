"""The comparison of all runs of the demo."""

import random

import pytest
import torch

from gradscale.demo.comparison import Comparison, chosen_device, compare, planned_runs
from gradscale.demo.precisions import PRECISIONS
from gradscale.demo.settings import Settings
from gradscale.errors import ConfigError

SMALL = Settings(steps=3, batch=64, depth=2, seed=5)


@pytest.fixture(scope="module")
def comparison():
    return compare(SMALL, lambda: None)


def test_there_is_one_run_per_precision_and_fp32_with_two_more_seeds(comparison):
    assert [run.name for run in comparison.runs] == [kind.name for kind in PRECISIONS]
    assert {run.seed for run in comparison.runs} == {5}
    assert [(run.name, run.seed) for run in comparison.other_seeds] == [
        ("FP32", 6),
        ("FP32", 7),
    ]


def test_the_seed_noise_is_the_range_of_the_fp32_losses(comparison):
    finals = [run.final_loss for run in comparison.other_seeds]
    finals.append(comparison.exact.final_loss)
    assert comparison.seed_noise == max(finals) - min(finals) > 0.0


def test_the_distance_is_measured_from_fp32_with_its_sign(comparison):
    exact, bf16 = comparison.runs[:2]
    assert comparison.distance(exact) == 0.0
    assert comparison.distance(bf16) == bf16.final_loss - exact.final_loss != 0.0


def test_an_untrained_model_is_worse_than_guessing_by_frequency(comparison):
    assert 2.5 < comparison.frequency_loss < comparison.exact.losses[0][1]


def test_the_weights_are_counted(comparison):
    embedding, output = 97 * 8, 97 * (SMALL.width + 1)
    hidden = SMALL.width * (64 + 1) + SMALL.width * (SMALL.width + 1)
    assert comparison.parameters == embedding + hidden + output


def test_a_comparison_repeats_itself_to_the_last_bit(comparison):
    assert compare(SMALL, lambda: None) == comparison


def test_on_step_is_called_after_every_step_of_every_run():
    calls = []
    compare(SMALL, lambda: calls.append(1))
    assert len(calls) == SMALL.steps * len(planned_runs(SMALL)) == 3 * 7


def test_the_settings_and_the_random_state_of_the_caller_are_left_alone():
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    python_state = random.getstate()
    compare(SMALL, lambda: None)
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state


def test_an_error_in_one_run_ends_all_and_is_raised():
    calls = []

    def fail_once():
        calls.append(1)
        if len(calls) == 20:
            raise ValueError("the twentieth step")

    long = Settings(steps=500, batch=64, depth=2)
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="the twentieth step"):
        compare(long, fail_once)
    assert len(calls) < 500
    assert torch.get_num_threads() == 2


def test_auto_takes_an_available_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert chosen_device("auto") == "cuda"
    assert chosen_device("cpu") == "cpu"


def test_auto_takes_the_cpu_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_device("auto") == "cpu"


def test_a_missing_gpu_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device=cuda.*Pass cpu or auto.*GS107"):
        chosen_device("cuda")


def test_a_comparison_is_a_value(comparison):
    assert isinstance(comparison, Comparison)
    assert hash(comparison) == hash(compare(SMALL, lambda: None))
