"""The model that owns an optimizer's parameters is found."""

import gc
import threading

import torch
from torch import nn

from gradscale.torch.monitor import model_lookup
from gradscale.torch.monitor.model_lookup import ModelLookup, find_model, instances_of


def test_the_outermost_module_is_found():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 1))
    assert find_model(list(model[0].parameters())) is model


def test_wrappers_are_removed():
    model = nn.Sequential(nn.Linear(2, 1))
    wrapped = nn.DataParallel(torch.compile(model))
    assert find_model(list(wrapped.parameters())) is model


def test_of_two_models_that_share_a_layer_the_one_with_all_parameters_is_found():
    layer = nn.Linear(2, 2)
    small, large = nn.Sequential(layer), nn.Sequential(layer, nn.Linear(2, 1))
    assert find_model(list(large.parameters())) is large
    assert find_model(list(small.parameters())) is small


def test_models_that_are_trained_together_are_found_together():
    body, head = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1))
    lookup = ModelLookup()
    found = lookup.of_params([*body.parameters(), *head.parameters()])
    group = found()
    assert [name for name, _ in group.named_parameters()] == [
        *("body.weight", "body.bias", "head.0.weight", "head.0.bias")
    ]
    assert [name for name, _ in group.named_modules()] == ["body", "head", "head.0"]
    assert group.get_submodule("head.0") is head[0]
    assert group.training
    body.eval()
    head.eval()
    assert not group.training


def test_models_that_are_trained_together_are_not_kept_alive():
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    lookup = ModelLookup()
    group = lookup.of_params([p for model in models for p in model.parameters()])()
    assert len(list(group.named_modules())) == 2
    models.clear()
    gc.collect()
    assert list(group.named_modules()) == []


def test_a_model_is_named_after_an_attribute_of_the_caller():
    class Trainer:
        def __init__(self):
            self.critic = nn.Linear(1, 1)

        def names(self):
            return model_lookup.variable_name(self.critic)

    assert Trainer().names() == "critic"


def test_parameters_without_a_module_have_none():
    assert find_model([nn.Parameter(torch.ones(2))]) is None


def test_objects_that_raise_do_not_disturb_the_search():
    class Odd(type):
        def __eq__(cls, other):
            return True

        __hash__ = None

    class Strange(metaclass=Odd):
        pass

    class Refusing(nn.Module):
        def parameters(self, recurse=True):
            raise RuntimeError("not now")

    kept = [Strange(), Refusing()]
    net = nn.Linear(2, 1)
    assert find_model(list(net.parameters())) is net
    assert len(kept) == 2


def test_the_search_does_not_disturb_tuples_that_another_thread_fills():
    # CPython raises SystemError if a tuple that it fills has a second reference.
    kept = [[number] for number in range(100_000)]
    tuples, errors, done = 0, [], threading.Event()

    def fill():
        nonlocal tuples
        while not done.is_set():
            try:
                tuples += len(tuple(_ for _ in range(20))) == 20
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    net = nn.Linear(2, 1)
    found = [net in instances_of(nn.Linear) for _ in range(40)]
    done.set()
    thread.join()
    assert found == [True] * 40
    assert (errors, tuples > 0, len(kept)) == ([], True, 100_000)


def test_a_model_is_searched_for_once_per_optimizer(monkeypatch):
    net, lookup = nn.Linear(2, 1), ModelLookup()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert lookup.of_optimizer(optimizer)() is net
    monkeypatch.setattr(model_lookup, "find_model", None)
    assert lookup.of_optimizer(optimizer)() is net


def test_a_model_is_not_kept_alive_and_is_searched_for_again():
    net, lookup = nn.Linear(2, 1), ModelLookup()
    params = list(net.parameters())
    found = lookup.of_params(params)
    assert found() is net
    del net
    gc.collect()
    assert found() is None
    assert lookup.of_params(params) is None


def test_the_result_for_an_optimizer_is_dropped_with_it():
    net, lookup = nn.Linear(2, 1), ModelLookup()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    lookup.of_optimizer(optimizer)
    assert len(lookup._found) == 1
    del optimizer
    gc.collect()
    assert lookup._found == {}
