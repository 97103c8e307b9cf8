"""Losses and nests of outputs times the scale."""

from collections import namedtuple

import pytest
import torch

from gradscale.torch import GradScaler

TORCH = torch.amp.GradScaler
SGD = torch.optim.SGD


def test_a_nest_of_lists_and_tuples_keeps_its_shape():
    nest = [torch.ones(()), (torch.ones(2), [torch.ones(1)])]
    first, (second, (third,)) = GradScaler("cpu", init_scale=4.0).scale(nest)
    assert first.item() == 4.0
    assert second.tolist() == [4.0, 4.0]
    assert third.tolist() == [4.0]


def test_types_of_a_nest_are_kept():
    scaled = GradScaler("cpu").scale([torch.ones(()), (torch.ones(()), [])])
    assert [type(x) for x in scaled] == [torch.Tensor, tuple]
    assert isinstance(scaled[1][1], list)


def test_a_named_tuple_inside_a_list_keeps_its_fields():
    losses = namedtuple("losses", "main aux")
    (scaled,) = GradScaler("cpu", init_scale=4.0).scale(
        [losses(torch.ones(()), torch.full((), 2.0))]
    )
    assert scaled == losses(torch.tensor(4.0), torch.tensor(8.0))


def test_another_iterable_becomes_an_iterator_as_in_torch():
    outputs = (torch.full((), value) for value in (1.0, 2.0))
    scaled = GradScaler("cpu", init_scale=4.0).scale(outputs)
    assert iter(scaled) is scaled
    assert [value.item() for value in scaled] == [4.0, 8.0]


@pytest.mark.parametrize(
    "outputs",
    ["text", {"loss": torch.ones(())}, b"bytes"],
    ids=["str", "dict", "bytes"],
)
def test_text_and_mappings_are_refused(outputs):
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable"):
        GradScaler("cpu").scale(outputs)


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(1.5),
        torch.tensor([1.5, -2.0]),
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor(1.5, dtype=torch.float16),
        torch.tensor([1.5, 2.0], dtype=torch.float16),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(1.5 + 1j),
        torch.tensor(3),
        torch.zeros(0),
        torch.eye(2).to_sparse(),
    ],
    ids=lambda output: f"{output.dtype}{list(output.shape)}{output.layout}",
)
def test_an_output_is_scaled_as_by_torch(output):
    ours, theirs = (k("cpu", init_scale=8.0).scale(output) for k in (GradScaler, TORCH))
    assert ours.dtype is theirs.dtype
    assert torch.equal(ours.to_dense(), theirs.to_dense())
