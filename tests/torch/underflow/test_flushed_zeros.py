"""The estimate from one sample of float16 training, against the same in f32."""

from functools import partial

import pytest
import torch

from gradscale.core.exponent_histogram import histogram_of
from gradscale.core.flushed_zeros import SPREAD, lost_share, tally_of
from gradscale.core.records import LOST_TOO_MUCH
from gradscale.torch.grads.collect import collect
from gradscale.torch.kernels.plain import SLOTS
from gradscale.torch.underflow.meter import Meter
from gradscale.torch.underflow.sample import row_of, tallies_of
from tests.torch.small_gradients import run_step, small_net, zero_share
from tests.torch.underflow.flushing_nets import (
    adapted,
    backward,
    embedding,
    really_lost,
    rectified,
    sampled,
    sigmoids,
)

DEEP, SHALLOW = partial(sigmoids, 8), partial(sigmoids, 4)
NETS = [DEEP, SHALLOW, rectified, embedding, adapted]
NAMES = ["deep", "shallow", "rectified", "embedding", "adapted"]
HEALTHY = [2.0**4, 2.0**8, 2.0**12, 2.0**16]


@pytest.mark.parametrize("scale", [2.0**-4, 1.0, 4.0])
def test_layers_that_get_only_zeros_count_as_lost(scale):
    sample, truth = sampled(DEEP, scale), really_lost(DEEP, scale)
    assert truth > LOST_TOO_MUCH
    assert sample.whole.lost == 0.0
    # Layers above them lose whole rows, more than a spread of 2.5 octaves does.
    assert truth - 0.1 < sample.lost_and_layer()[0] <= truth


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**-10, 2.0**-8])
def test_flushed_layers_of_a_shallow_network_count_as_lost_at_a_lower_scale(scale):
    truth = really_lost(SHALLOW, scale)
    assert truth > LOST_TOO_MUCH
    assert LOST_TOO_MUCH < sampled(SHALLOW, scale).lost_and_layer()[0] <= truth + 0.01


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**-10, 2.0**-8, 2.0**-6, 2.0**-4])
def test_true_zeros_do_not_count_beside_flushed_ones(scale):
    truth = really_lost(rectified, scale)
    zeros = zero_share(sampled(rectified, scale).whole)
    assert zeros > truth + 0.05
    assert sampled(rectified, scale).lost_and_layer()[0] == pytest.approx(
        truth, abs=0.07
    )


@pytest.mark.parametrize("make", [rectified, embedding, adapted])
@pytest.mark.parametrize("scale", HEALTHY)
def test_true_zeros_do_not_count_at_a_healthy_scale(make, scale):
    sample = sampled(make, scale)
    assert zero_share(sample.whole) > 0.2
    assert sample.lost_and_layer()[0] < 0.001


@pytest.mark.parametrize("make", NETS, ids=NAMES)
@pytest.mark.parametrize("scale", [2.0**-6, 1.0, 2.0**12])
def test_a_run_file_gives_the_same_estimate_as_the_live_sample(make, scale):
    sample = sampled(make, scale)
    rows = (histogram_of(row, scale) for row in sample.rows().values())
    assert lost_share(map(tally_of, rows)) == sample.lost_and_layer()[0]


def test_a_float32_gradient_gives_the_same_estimate_in_a_run_file():
    meter = Meter()
    run_step(meter, small_net(), 1.0, half=False)
    (sample,) = meter.finish()
    rows = (histogram_of(row, 1.0) for row in sample.rows().values())
    assert lost_share(map(tally_of, rows)) == sample.lost_and_layer()[0]
    assert sample.lost_and_layer()[0] > LOST_TOO_MUCH


@pytest.mark.parametrize("seed", range(5))
def test_tallies_of_counts_are_those_of_their_histograms(seed):
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(500, generator=generator).double()
    grad *= 2.0 ** torch.randint(-60, 20, (500,), generator=generator)
    grad[::7] = 0.0
    weight = torch.nn.Parameter(torch.zeros(500, dtype=torch.float64))
    weight.grad = grad
    meter = Meter()
    meter.sample(collect([weight], allow_fp16=False), torch.tensor(1.0))
    meter.end_step()
    (sample,) = meter.finish()
    (seen,) = sample.tensors.values()
    assert sample.counts.shape == (1, SLOTS)
    assert tallies_of(sample.counts) == [tally_of(seen)]
    assert tally_of(histogram_of(row_of(seen), 1.0)) == tally_of(seen)


def test_gradients_of_weights_are_about_as_wide_as_assumed():
    widths = []
    for make in NETS:
        net = make()
        backward(net, 1.0, half=False)
        for param in net[0].parameters():
            grad = param.grad
            if grad is not None and (grad != 0.0).sum() > 100:
                widths.append(grad[grad != 0.0].abs().log2().std().item())
    assert 1.5 < sum(widths) / len(widths) < SPREAD
    assert max(widths) < SPREAD + 1.0
