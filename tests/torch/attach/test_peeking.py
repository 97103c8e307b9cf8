"""A look at gradients that leaves them as they are."""

import math

import torch

from gradscale.torch.attach.peeking import peek


def looked_at(**grads):
    """Look at gradients given by name; return what was seen, and the parameters."""
    model = torch.nn.Module()
    for name, grad in grads.items():
        shape = () if grad is None else grad.shape
        dtype = torch.float32 if grad is None else grad.dtype
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = grad
        model.register_parameter(name, param)
    return peek(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_the_largest_magnitude_of_all_and_of_each_is_seen():
    seen = looked_at(a=torch.tensor([1.0, -5.0]), b=torch.tensor([math.inf, 0.0]))
    assert seen.peak.item() == math.inf
    assert seen.named() == {"a": 5.0, "b": math.inf}


def test_a_nan_is_seen_as_one():
    seen = looked_at(a=torch.tensor([math.inf, math.nan]), b=torch.tensor([2.0]))
    assert math.isnan(seen.peak.item())
    assert math.isnan(seen.named()["a"])
    assert seen.named()["b"] == 2.0


def test_parts_of_complex_gradients_count_each():
    grad = torch.tensor([3.0 - 7.0j], dtype=torch.complex64)
    assert looked_at(a=grad).peak.item() == 7.0


def test_a_sparse_gradient_is_left_as_it_came():
    grad = torch.sparse_coo_tensor([[1, 1]], [2.0, math.inf], (4,))
    seen = looked_at(a=grad)
    assert seen.named() == {"a": math.inf}
    assert not grad.is_coalesced()


def test_gradients_of_different_dtypes_have_one_peak():
    half = torch.tensor([math.inf], dtype=torch.float16)
    seen = looked_at(a=torch.tensor([9.0], dtype=torch.float64), b=half)
    assert seen.peak.item() == math.inf
    assert seen.named() == {"b": math.inf}


def test_missing_and_empty_gradients_are_passed_over():
    seen = looked_at(a=None, b=torch.zeros(0))
    assert (seen.peak, seen.named()) == (None, {})


def test_nothing_is_written_to_the_gradients():
    grad = torch.tensor([1.0, math.inf])
    version = grad._version
    looked_at(a=grad)
    assert grad._version == version
