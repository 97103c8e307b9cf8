"""The model that owns an optimizer's parameters is found."""

import torch
from torch import nn

from gradscale.torch.monitor.model_lookup import find_model


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
