"""What the meter tells of real float16 training, against the same in f32."""

import pytest
import torch

from gradscale.core.exponent_histogram import (
    fate,
    pooled,
    shift_between,
)
from gradscale.torch.underflow.meter import Meter
from tests.torch.small_gradients import run_step, small_net, weights, zero_share

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
    told = {name: zero_share(fate(sample.tensors[name])) for name in weights(twin)}
    assert told == pytest.approx({name: truth[name] for name in told}, abs=CLOSE)
    # Else there would be nothing to tell.
    assert max(told.values()) > 0.2


def test_a_sample_of_f32_gradients_tells_what_float16_will_flush():
    twin = small_net()
    truth = cast_offline(twin)
    sample = sampled(twin, 1.0, half=False)
    told = {name: zero_share(fate(seen)) for name, seen in sample.tensors.items()}
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


@pytest.mark.parametrize("shift", [2, 4, 6])
def test_training_at_another_scale_flushes_as_much_as_predicted(shift):
    whole = pooled(sampled(small_net(), 1.0, half=False).tensors.values())
    assert fate(whole).lost > 0.1
    trained = sampled(small_net(), 2.0**shift, half=True).whole
    assert zero_share(trained) == pytest.approx(fate(whole, shift).lost, abs=CLOSE)


def test_flushed_zeros_of_float16_gradients_are_all_estimated():
    seen = sampled(small_net(), 1.0, half=True)
    truth = sampled(small_net(), 1.0, half=False).whole.lost
    assert seen.whole.lost == 0.0
    # Every zero is counted: none of them is a true zero.
    assert seen.lost_and_layer()[0] == pytest.approx(truth, abs=CLOSE)


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
            told = zero_share(fate(ours.tensors[name]))
            assert told == pytest.approx(
                zero_share(fate(theirs.tensors[name])), abs=2 * CLOSE
            ), (ours.step, name)
