"""Gradients of activations are counted in sampled steps; other steps have no hook."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gradscale.torch.grads.collect import collect
from gradscale.torch.kernels.plain import count_tensors
from gradscale.torch.underflow.meter import Meter
from gradscale.torch.underflow.sample import OUTPUT, row_of
from tests.torch.small_gradients import loss_of, run_step, small_net

ANY = (torch.float32, torch.float16)


def hooks_on(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def finished(meter, model, loss):
    """Run backward and end the step; return its sample."""
    loss.backward()
    params = [param for param in model.parameters() if param.grad is not None]
    meter.sample(collect(params, allow_fp16=True), torch.tensor(1.0), (model,))
    meter.end_step()
    (sample,) = meter.finish()
    return sample


def test_the_counts_are_those_of_the_gradients_that_flow():
    model, meter, seen = small_net(), Meter(), {}
    meter.watch_activations(model)

    def keep(name):
        def forward_hook(module, inputs, output):
            output.register_hook(lambda grad: seen.__setitem__(name, grad.clone()))

        return forward_hook

    for name, module in model.named_children():
        module.register_forward_hook(keep(name))
    sample = finished(meter, model, loss_of(model, half=True))
    assert {grad.dtype for grad in seen.values()} == {torch.float16}
    assert set(sample.activations) == set(seen) == {"0", "1", "2", "3"}
    for name, grad in seen.items():
        histogram = sample.activations[name]
        row = row_of(histogram)
        assert row.total == grad.numel()
        assert row.zeros == int((grad == 0.0).sum())
        tiny = (grad != 0.0) & (grad.float().abs() < 2.0**-14)
        assert row.subnormals == int(tiny.sum())
        assert sum(histogram.bins) == int(count_tensors([grad])[0, 2:61].sum())


@pytest.mark.parametrize(("factor", "flushed"), [(2.0**6, False), (2.0**-13, True)])
def test_a_flush_is_counted_at_the_module_where_it_happens(factor, flushed):
    model, meter = small_net(), Meter()
    meter.watch_activations(model)
    sample = finished(meter, model, factor * loss_of(model, half=True))
    assert (sample.activations["3"].zeros > 0) == flushed


def test_rows_of_the_run_file_distinguish_modules_from_parameters():
    model, meter = small_net(), Meter()
    meter.watch_activations(model)
    rows = finished(meter, model, loss_of(model, half=True)).rows()
    assert set(rows) == {f"{n}.weight" for n in (0, 2, 3)} | {
        str(n) + OUTPUT for n in range(4)
    }


def test_hooks_are_registered_in_sampled_steps_only():
    model, meter = small_net(), Meter(every=4)
    meter.watch_activations(model)
    there = {}
    for step in range(1, 10):
        there[step] = hooks_on(model) > 0
        run_step(meter, model, 1.0, half=True)
    assert there == {step: step in (1, 2, 4, 8) for step in range(1, 10)}


def test_a_graph_that_the_user_keeps_has_no_hooks_left():
    model, meter = small_net(), Meter(every=100)
    meter.watch_activations(model)
    loss = loss_of(model, half=True)
    loss.backward(retain_graph=True)
    run_step(meter, model, 1.0, half=True)
    (activations,) = meter._activations
    loss.backward()
    assert activations._counts == {}


def test_values_and_gradients_are_the_same_as_without():
    with_it, without = small_net(), small_net()
    meter = Meter(every=1)
    meter.watch_activations(with_it)
    run_step(meter, with_it, 8.0, half=True)
    (8.0 * loss_of(without, half=True)).backward()
    for ours, theirs in zip(with_it.parameters(), without.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_an_output_that_is_passed_on_is_counted_once_for_the_innermost_module():
    inner = torch.nn.Sequential(torch.nn.Linear(4, 3))
    model, meter = torch.nn.Sequential(inner), Meter()
    meter.watch_activations(model, dtypes=ANY)
    sample = finished(meter, model, model(torch.ones(2, 4)).sum())
    assert {name: seen.total for name, seen in sample.activations.items()} == {"0.0": 6}


def test_passes_of_one_step_are_added_up():
    model, meter = torch.nn.Linear(4, 3), Meter()
    meter.watch_activations(model, dtypes=ANY)
    model(torch.ones(2, 4)).sum().backward()
    sample = finished(meter, model, model(torch.ones(5, 4)).sum())
    assert sample.activations[""].total == 6 + 15


def test_gradients_of_other_dtypes_are_ignored():
    model, meter = torch.nn.Linear(4, 3), Meter()
    meter.watch_activations(model)
    sample = finished(meter, model, model(torch.ones(2, 4)).sum())
    assert sample.activations == {}


def test_outputs_in_tuples_and_dicts_are_counted_unless_without_gradient():
    class Several(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return {
                "a": (self.weight * x, x.detach()),
                "b": [2.0 * self.weight],
                "c": 1,
            }

    model, meter = Several(), Meter()
    meter.watch_activations(model, dtypes=ANY)
    out = model(torch.ones(3))
    sample = finished(meter, model, out["a"][0].sum() + out["b"][0].sum())
    assert sample.activations[""].total == 6


def test_an_evaluation_is_not_counted():
    model, meter = torch.nn.Linear(4, 3), Meter()
    meter.watch_activations(model, dtypes=ANY)
    model.eval()(torch.ones(2, 4)).sum().backward()
    assert hooks_on(model) == 0
    sample = finished(meter, model.train(), model(torch.ones(5, 4)).sum())
    assert sample.activations == {}


def test_copies_and_pickles_of_the_model_can_be_made_in_a_sampled_step():
    model, meter = torch.nn.Linear(4, 3), Meter()
    meter.watch_activations(model, dtypes=ANY)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(2, 4)).sum().backward()
        assert torch.equal(twin.weight, model.weight)
    sample = finished(meter, model, model(torch.ones(5, 4)).sum())
    assert sample.activations[""].total == 15


def test_outputs_of_unusual_classes_are_let_through():
    class Raising:
        def __getattr__(self, name):
            raise KeyError(name)

    class Odd(torch.nn.Linear):
        def forward(self, x):
            return Raising(), super().forward(x).to_sparse()

    model, meter = Odd(4, 3), Meter()
    meter.watch_activations(model, dtypes=ANY)
    _, out = model(torch.ones(2, 4))
    assert finished(meter, model, out.to_dense().sum()).activations == {}
    assert meter.failures == []


def test_a_failure_is_kept_once_and_ends_the_counting(monkeypatch):
    model, meter = torch.nn.Linear(4, 3), Meter(every=1)
    meter.watch_activations(model, dtypes=ANY)

    def fail(*_):
        raise LookupError("no counts")

    monkeypatch.setattr(meter._activations[0]._counter, "count", fail)
    for _ in range(3):
        assert finished(meter, model, model(torch.ones(2, 4)).sum()).activations == {}
        assert hooks_on(model) == 0
    assert meter.failures == ["LookupError: no counts"]


def test_an_abandoned_step_leaves_no_counts():
    model, meter = torch.nn.Linear(4, 3), Meter()
    meter.watch_activations(model, dtypes=ANY)
    model(torch.ones(2, 4)).sum().backward()
    meter.forget()
    sample = finished(meter, model, model(torch.ones(5, 4)).sum())
    assert sample.activations[""].total == 15


def test_a_new_start_between_sampled_steps_leaves_no_hook():
    model, meter = torch.nn.Linear(4, 3), Meter(every=100)
    meter.watch_activations(model, dtypes=ANY)
    assert hooks_on(model) == 1
    meter.start(150)
    assert hooks_on(model) == 0


def test_a_start_at_the_present_step_changes_nothing():
    model, meter = torch.nn.Linear(4, 3), Meter()
    meter.watch_activations(model, dtypes=ANY)
    loss = model(torch.ones(2, 4)).sum()
    meter.start(0)
    assert finished(meter, model, loss).activations[""].total == 6


def test_a_compiled_model_is_left_alone():
    model, meter = torch.nn.Sequential(torch.nn.Linear(4, 3)), Meter()
    model[0].compile(backend="eager")
    meter.watch_activations(model)
    assert hooks_on(model) == 0


def test_the_model_is_not_kept_alive():
    model, meter = torch.nn.Linear(4, 3), Meter(every=4)
    meter.watch_activations(model)
    meter.end_step()
    meter.end_step()
    del model
    (activations,) = meter._activations
    meter.end_step()
    assert meter.wanted
    assert not activations.enabled


def test_watching_begins_with_the_next_sampled_step():
    model, meter = torch.nn.Linear(4, 3), Meter(every=4)
    meter.end_step()
    meter.end_step()
    meter.watch_activations(model)
    assert hooks_on(model) == 0
    meter.end_step()
    assert hooks_on(model) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_supported(reentrant):
    model, meter = torch.nn.Linear(4, 3), Meter()
    meter.watch_activations(model, dtypes=ANY)
    x = torch.ones(2, 4, requires_grad=True)
    out = checkpoint(model, x, use_reentrant=reentrant)
    sample = finished(meter, model, out.sum())
    assert sample.activations[""].total == 6


def test_a_module_that_writes_in_place_is_supported():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(inplace=True))
    meter = Meter()
    meter.watch_activations(model, dtypes=ANY)
    sample = finished(meter, model, model(torch.ones(2, 4)).sum())
    assert {name: seen.total for name, seen in sample.activations.items()} == {
        "0": 6,
        "1": 6,
    }
