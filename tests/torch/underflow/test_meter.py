"""The underflow meter: sampled steps, counts, and when samples arrive."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.core.exponent_histogram import pooled
from gradscale.errors import ConfigError
from gradscale.runfile import RunWriter, open_run
from gradscale.runfile.thinning import due
from gradscale.torch.device_state.async_copy import LAG
from gradscale.torch.grads.collect import collect
from gradscale.torch.underflow.meter import Meter

VALUES = [0.0, -0.0, 2.0**-60, 2.0**-30, 2.0**-24, -(2.0**-15), 1.0, 2.0**15, 2.0**17]


def with_grads(*grads):
    """Return the collected gradients of parameters with these gradients."""
    params = []
    for grad in grads:
        params.append(torch.nn.Parameter(torch.zeros_like(grad)))
        params[-1].grad = grad
    return collect(params, allow_fp16=True)


def stepped(meter, gradients, scale=1.0, steps=1):
    """Take steps and sample the wanted ones; return all samples, pending ones too."""
    samples = []
    for _ in range(steps):
        if meter.wanted:
            meter.sample(gradients, torch.tensor(scale))
        samples.append(meter.end_step())
    return [each for each in samples if each is not None] + meter.finish()


@settings(max_examples=40)
@given(every=st.integers(1, 70), start=st.integers(0, 300))
def test_the_steps_of_the_schedule_are_wanted_and_no_others(every, start):
    meter = Meter(every)
    meter.start(start)
    wanted = []
    for step in range(start + 1, start + 200):
        if meter.wanted:
            wanted.append(step)
        meter.end_step()
    assert wanted == [s for s in range(start + 1, start + 200) if due(s, every)]


@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
def test_a_sample_is_returned_once_after_the_lag(every):
    meter, gradients = Meter(every), with_grads(torch.ones(3))
    returned = {}
    for step in range(1, 40):
        if meter.wanted:
            meter.sample(gradients, torch.tensor(float(step)))
        sample = meter.end_step()
        if sample is not None:
            assert sample.step not in returned
            assert sample.scale == sample.step
            returned[sample.step] = step
    expected = [s for s in range(1, 40 - LAG) if due(s, every)]
    assert returned == {step: step + LAG for step in expected}


def test_a_step_that_is_not_sampled_is_one_comparison(monkeypatch):
    meter = Meter(100)
    stepped(meter, with_grads(torch.ones(3)), steps=66)
    monkeypatch.setattr(meter, "_begin_step", None)
    assert [meter.end_step() for _ in range(98 - 66)] == [None] * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_each_element_is_counted_where_it_belongs(dtype):
    grad = torch.tensor([*VALUES, math.inf, -math.nan], dtype=dtype)
    (sample,) = stepped(Meter(), with_grads(grad), scale=8.0)
    (row,) = sample.rows().values()
    assert (row.total, row.zeros, row.subnormals) == (11, 2, 2)
    assert (row.below, row.above, row.nonfinite) == (2, 1, 2)
    filled = {place - 24: n for place, n in enumerate(row.histogram) if n}
    assert filled == {-24: 1, -15: 1, 0: 1, 15: 1}
    (seen,) = sample.tensors.values()
    assert (seen.scale, seen.deep, seen.between(-30, -29)) == (8.0, 1, 1)


@settings(max_examples=40)
@given(
    numbers=st.lists(st.floats(width=32), min_size=1, max_size=50),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_a_row_adds_up(numbers, dtype):
    grad = torch.tensor(numbers).to(dtype)
    (sample,) = stepped(Meter(), with_grads(grad))
    (row,) = sample.rows().values()
    assert row.total == len(numbers)
    assert row.total == sum((row.zeros, row.below, row.above, row.nonfinite)) + sum(
        row.histogram
    )
    assert row.subnormals == sum(row.histogram[:10])
    wide = grad.double().abs()
    tiny = (wide >= 2.0**-24) & (wide < 2.0**-14)
    assert row.subnormals == int(tiny.sum())


def test_the_total_leaves_activations_out():
    grads = torch.tensor([0.0, 2.0**-30, 1.0]), torch.tensor([2.0**-26, 3.0])
    (sample,) = stepped(Meter(), with_grads(*grads))
    assert sample.whole.lost == 2 / 4
    assert (sample.whole.zeros, sample.whole.flushed) == (1, 2)
    assert sample.total == pooled(sample.tensors.values())


def test_any_mix_of_dtypes_keeps_its_names():
    model = torch.nn.ParameterDict(
        {
            "a": torch.nn.Parameter(torch.zeros(1)),
            "b": torch.nn.Parameter(torch.zeros(2, dtype=torch.float16)),
            "c": torch.nn.Parameter(torch.zeros(3)),
            "d": torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        }
    )
    for param in model.values():
        param.grad = torch.ones_like(param)
    meter = Meter(names=(model,))
    meter.sample(collect(model.values(), allow_fp16=True), torch.tensor(1.0))
    meter.end_step()
    (sample,) = meter.finish()
    totals = {name: seen.total for name, seen in sample.tensors.items()}
    assert totals == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_parameters_without_names_are_kept_apart():
    grads = torch.ones(3), torch.zeros(3)
    (sample,) = stepped(Meter(), with_grads(*grads))
    assert len(sample.tensors) == 2
    assert [seen.zeros for seen in sample.tensors.values()] == [0, 3]


def test_optimizers_that_step_one_after_the_other_share_a_sample():
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    meter = Meter(names=(torch.nn.ModuleDict({"first": first, "second": second}),))
    for model in (first, second):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        gradients = collect(list(model.parameters()), allow_fp16=False)
        meter.sample(gradients, torch.tensor(4.0))
    meter.end_step()
    (sample,) = meter.finish()
    assert set(sample.tensors) == {
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    }


def test_writes_after_the_sample_do_not_change_it():
    grad, scale = torch.ones(4), torch.tensor(8.0)
    meter = Meter()
    meter.sample(with_grads(grad), scale)
    grad.zero_()
    scale.fill_(1.0)
    meter.end_step()
    (sample,) = meter.finish()
    assert (sample.scale, sample.whole.zeros) == (8.0, 0)


def test_nothing_is_written_to_the_gradients():
    grad = torch.tensor(VALUES)
    before, version = grad.clone(), grad._version
    stepped(Meter(), with_grads(grad))
    assert torch.equal(grad, before)
    assert grad._version == version


def test_a_sampled_step_without_gradients_gives_no_sample():
    assert stepped(Meter(every=1), with_grads(), steps=4) == []


def test_a_wanted_step_without_a_sample_gives_none():
    meter = Meter(every=1)
    meter.end_step()
    assert meter.finish() == []


def test_an_abandoned_step_leaves_no_sample():
    meter = Meter()
    meter.sample(with_grads(torch.zeros(3)), torch.tensor(1.0))
    meter.forget()
    meter.sample(with_grads(torch.ones(3)), torch.tensor(2.0))
    meter.end_step()
    (sample,) = meter.finish()
    assert (sample.scale, sample.whole.zeros) == (2.0, 0)
    assert len(sample.tensors) == 1


def test_a_resumed_run_continues_the_step_count():
    meter = Meter(100)
    meter.start(199)
    (sample,) = stepped(meter, with_grads(torch.ones(3)))
    assert sample.step == 200


def test_a_start_drops_pending_samples():
    meter = Meter()
    meter.sample(with_grads(torch.ones(3)), torch.tensor(1.0))
    meter.end_step()
    meter.start(50)
    assert meter.finish() == []


@pytest.mark.parametrize("every", [0, -3])
def test_an_interval_below_one_is_refused(every):
    with pytest.raises(ConfigError, match=f"every={every}.*Pass 100"):
        Meter(every)


def test_the_run_file_keeps_a_sample_as_it_is(tmp_path):
    meter = Meter(names=())
    grads = torch.tensor(VALUES), torch.full((300,), 2.0**-20)
    (sample,) = stepped(meter, with_grads(*grads), scale=8.0)
    with RunWriter(tmp_path / "run.gs") as run:
        run.step(sample.step, sample.scale, True, "GS000")
        run.samples(sample.step, sample.rows())
    with open_run(tmp_path / "run.gs") as run:
        kept = {row.tensor: row.sample for row in run.samples(1)}
    assert kept == sample.rows()
