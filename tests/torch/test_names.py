"""Names for parameters."""

import torch

from gradscale.torch.names import names_of
from tests.torch.training import parameter


def test_the_models_name_comes_first():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert names_of([model.bias, model.weight], (model, optimizer)) == [
        "bias",
        "weight",
    ]


def test_without_a_model_group_and_index_name_it():
    params = [parameter(1) for _ in range(3)]
    optimizer = torch.optim.SGD(
        [{"params": params[:2]}, {"params": params[2:]}], lr=1.0
    )
    assert names_of(params[1:], (None, optimizer)) == [
        "param_groups[0]['params'][1]",
        "param_groups[1]['params'][0]",
    ]


def test_the_names_an_optimizer_was_given_are_used():
    param = parameter(1)
    optimizer = torch.optim.SGD([("head", param)], lr=1.0)
    assert names_of([param], (None, optimizer)) == ["head"]


def test_a_parameter_the_model_does_not_know_is_named_by_the_optimizer():
    param = parameter(1)
    sources = (torch.nn.Linear(1, 1), torch.optim.SGD([param], lr=1.0))
    assert names_of([param], sources) == ["param_groups[0]['params'][0]"]


def test_a_stranger_is_described_by_its_shape():
    assert names_of([parameter(2, 3)]) == ["a parameter of shape (2, 3)"]
