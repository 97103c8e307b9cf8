"""One run in one precision."""

from dataclasses import replace

import pytest
import torch

from gradscale.core.policies import DynamicScale
from gradscale.demo.model import seeded_model
from gradscale.demo.precisions import (
    BF16,
    FP16_BARE,
    FP16_DYNAMIC,
    FP16_STATIC,
    FP32,
    PRECISIONS,
    Precision,
)
from gradscale.demo.settings import Settings
from gradscale.demo.text import library_text
from gradscale.demo.training import lost_share, train

SMALL = Settings(steps=3, batch=64, depth=2)
# The shape that the demo has, on a batch that FP16 on a CPU takes quickly.
DEEP = Settings(steps=1, batch=512)


def run(precision, settings, on_step=lambda: None):
    return train(precision, seeded_model(settings), library_text(), settings, on_step)


def test_a_lost_element_is_zero_here_and_not_in_fp32():
    exact = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([-1e-30, 0.0])]
    seen = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([-0.0, 5.0])]
    assert lost_share(exact, seen) == pytest.approx(2 / 3)


def test_nothing_is_lost_where_there_is_nothing():
    assert lost_share([torch.zeros(3)], [torch.zeros(3)]) == 0.0


def test_fp32_loses_nothing_and_learns():
    settings = replace(SMALL, steps=30, learning_rate=1e-2)
    done = run(FP32, settings)
    assert done.lost_share == 0.0
    assert done.final_loss < done.losses[0][1] - 0.5


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda kind: kind.name)
def test_a_run_repeats_itself_to_the_last_bit(precision):
    assert run(precision, SMALL) == run(precision, SMALL)


def test_another_seed_gives_another_run():
    assert run(FP32, SMALL).losses != run(FP32, replace(SMALL, seed=1)).losses


def test_all_precisions_start_from_the_same_weights():
    assert len({run(kind, SMALL).losses[0] for kind in PRECISIONS}) == 1


def test_bare_fp16_loses_gradients_in_a_deep_network_and_scaling_brings_them_back():
    lost = [run(kind, DEEP).lost_share for kind in PRECISIONS]
    fp32, bf16, bare, static, dynamic = lost
    assert fp32 == 0.0
    assert bf16 < 0.01
    assert bare > 0.4
    assert static < bare - 0.15
    assert dynamic < static - 0.05


def test_bare_fp16_loses_nothing_in_a_shallow_network():
    assert run(FP16_BARE, replace(DEEP, depth=2)).lost_share < 0.01


def test_a_run_without_a_scaler_has_no_scales():
    assert run(FP16_BARE, SMALL).scales == ()
    assert run(BF16, SMALL).scales == ()


def test_the_scale_of_every_step_is_kept():
    assert run(FP16_STATIC, SMALL).scales == (2.0**12,) * 3
    assert run(FP16_DYNAMIC, SMALL).scales == (2.0**16,) * 3


def test_a_skipped_step_is_kept_and_not_measured():
    policy = DynamicScale(init_scale=2.0**40, backoff_factor=2.0**-30)
    towering = Precision(name="too high", dtype=torch.float16, policy=policy)
    done = run(towering, SMALL)
    assert done.skipped == (0,)
    assert done.scales == (2.0**40, 2.0**10, 2.0**10)
    alone = run(towering, replace(SMALL, steps=1))
    assert alone.final_loss == alone.losses[0][1]
    # Not a number: there was no step to measure.
    assert alone.lost_share != alone.lost_share


def test_the_loss_is_kept_with_the_steps_done_before_it():
    done = run(FP32, replace(SMALL, steps=7))
    assert [steps for steps, _ in done.losses] == [0, 5, 7]


def test_on_step_is_called_after_every_step():
    calls = []
    run(FP32, SMALL, lambda: calls.append(1))
    assert len(calls) == SMALL.steps


def test_the_share_is_measured_from_the_first_step_on_and_the_loss_to_the_last():
    settings = Settings(steps=23, measurements=4)
    assert list(settings.measured_steps) == [0, 5, 10, 15, 20]
    assert settings.shown_steps == [5, 10, 15, 20, 23]
