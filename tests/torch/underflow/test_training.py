"""What the meter tells of real float16 training, against the same in f32."""

import pytest
import torch

from gradscale.core.exponent_histogram import (
    fate,
    pooled,
    shift_between,
    smallest_scale,
)
from gradscale.core.flushed import estimate_flushed
from gradscale.core.scale_advice import advice
from gradscale.torch.underflow.meter import Meter
from tests.torch.small_gradients import run_step, small_net, weights

# A thousandth of the elements: the promise of docs/underflow.md.
CLOSE = 0.001


def sampled(model, scale, *, half):
    """Return the sample of one step at this scale."""
    meter = Meter()
    run_step(meter, model, scale, half=half)
    (sample,) = meter.finish()
    return sample


def cast_offline(model):
    """Return the share of zeros in each gradient of an f32 twin, cast to float16."""
    sampled(model, 1.0, half=False)
    return {
        name: (param.grad.half() == 0.0).double().mean().item()
        for name, param in model.named_parameters()
    }


def test_without_a_scale_the_share_of_zeros_is_that_of_f32_cast_offline():
    half, twin = small_net(), small_net()
    sample, truth = sampled(half, 1.0, half=True), cast_offline(twin)
    told = {name: fate(sample.tensors[name]).zero_share for name in weights(twin)}
    assert told == pytest.approx({name: truth[name] for name in told}, abs=CLOSE)
    # Else there would be nothing to tell.
    assert max(told.values()) > 0.2


def test_a_sample_of_f32_gradients_tells_what_float16_will_flush():
    twin = small_net()
    truth = cast_offline(twin)
    sample = sampled(twin, 1.0, half=False)
    told = {name: fate(seen).zero_share for name, seen in sample.tensors.items()}
    assert told == truth


@pytest.mark.parametrize("scale", [2.0**6, 2.0**12, 2.0**-3])
def test_a_sample_at_one_scale_tells_of_every_other(scale):
    twin = small_net()
    seen = sampled(twin, 1.0, half=False)
    moved = sampled(small_net(), scale, half=False)
    shift = shift_between(1.0, scale)
    assert [fate(one, shift) for one in seen.tensors.values()] == [
        fate(one) for one in moved.tensors.values()
    ]


def test_the_scale_it_advises_loses_as_little_as_it_says():
    whole = pooled(sampled(small_net(), 1.0, half=False).tensors.values())
    scale = smallest_scale(whole)
    shift = shift_between(1.0, scale)
    assert fate(whole).lost > 0.1
    assert advice(whole).startswith(f"raise S to 2^{shift}: lost elements ")
    trained = sampled(small_net(), scale, half=True).whole
    assert trained.zero_share == pytest.approx(fate(whole, shift).lost, abs=CLOSE)
    assert trained.zero_share <= 0.003 + CLOSE


def test_float16_alone_tells_that_a_higher_scale_is_needed():
    seen = sampled(small_net(), 1.0, half=True)
    truth = sampled(small_net(), 1.0, half=False).whole.lost
    assert seen.whole.lost == 0.0
    # All zeros are counted, and none is true.
    assert seen.lost == pytest.approx(truth, abs=CLOSE)
    assert advice(seen.total).startswith("raise S to 2^")


@pytest.mark.parametrize("high", [2.0, 16.0])
def test_two_scales_tell_what_backward_has_flushed(high):
    twin = small_net()
    low = sampled(small_net(), 1.0, half=True)
    above = sampled(small_net(), high, half=True)
    sampled(twin, 1.0, half=False)
    for name, param in weights(twin).items():
        told = estimate_flushed(low.tensors[name], above.tensors[name])
        lost = (param.grad != 0.0) & (param.grad.half() == 0.0)
        truth = lost.double().mean().item()
        assert told.reliable, name
        assert told.at_least <= truth + CLOSE, name
        # One power for all that lies below: a hundredth of the elements.
        assert told.at_low == pytest.approx(truth, abs=0.01), name


def test_in_training_the_zeros_of_each_layer_follow_those_of_f32():
    half, twin = small_net(), small_net()
    meter, reference = Meter(every=2), Meter(every=2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (half, twin)]
    samples, truths = [], []
    for batch in range(8):
        samples += run_step(meter, half, 1.0, half=True, batch=batch)
        truths += run_step(reference, twin, 1.0, half=False, batch=batch)
        for optimizer in optimizers:
            optimizer.step()
    assert [sample.step for sample in samples] == [1, 2, 4, 6]
    for ours, theirs in zip(samples, truths, strict=True):
        for name in weights(twin):
            told = fate(ours.tensors[name]).zero_share
            assert told == pytest.approx(
                fate(theirs.tensors[name]).zero_share, abs=2 * CLOSE
            ), (ours.step, name)
