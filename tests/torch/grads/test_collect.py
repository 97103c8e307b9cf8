"""Collecting gradients of every layout and dtype, or refusing them by name."""

from operator import is_

import numpy
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from gradscale.errors import GradientError
from gradscale.torch.grads import collect as collecting
from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.stats import read
from tests.torch.training import INF, parameter, sparse

CPU = torch.device("cpu")
ONE = torch.ones(())
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _holding(*grads):
    """Return parameters that have these gradients."""
    params = [
        torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype)) for grad in grads
    ]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def test_gradients_without_elements_count_and_are_not_read():
    found = collect(_holding(torch.zeros(0), torch.zeros(3, 0)), allow_fp16=False)
    assert (found.present, found.tensors) == (2, [])


def test_parameters_without_a_gradient_are_passed_over():
    found = collect([parameter(2), *_holding(torch.ones(3))], allow_fp16=False)
    assert (found.present, len(found.tensors)) == (1, 1)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_duplicates_of_a_sparse_gradient_are_summed_before_they_are_read(dtype):
    most = torch.finfo(dtype).max
    (param,) = _holding(torch.zeros(4, dtype=dtype))
    param.grad = sparse([1, 1, 2], [most, most, 1.0], 4, dtype=dtype)
    assert read(collect([param], allow_fp16=True), CPU).nonfinite(ONE).item() == 1.0
    # As torch does: it sums those of f16 only.
    assert param.grad.is_coalesced() is (dtype is torch.float16)


def test_duplicates_that_cancel_are_finite():
    (param,) = _holding(torch.zeros(4))
    param.grad = sparse([1, 1], [3e38, -3e38], 4)
    assert read(collect([param], allow_fp16=True), CPU).amax().item() == 0.0


def test_slices_that_overlap_through_numpy_are_refused_by_name():
    memory = numpy.zeros(6, dtype=numpy.float32)
    params = _holding(torch.zeros(4), torch.zeros(4))
    params[0].grad = torch.from_numpy(memory[:4])
    params[1].grad = torch.from_numpy(memory[2:])
    with pytest.raises(GradientError, match="overlaps another one's memory"):
        collect(params, allow_fp16=False)


def test_a_sparse_gradient_without_entries_counts():
    (param,) = _holding(torch.zeros(4))
    param.grad = sparse([], torch.zeros(0), 4)
    found = collect([param], allow_fp16=False)
    assert (found.present, found.tensors) == (1, [])


def test_a_sparse_gradient_of_rows_is_read():
    (param,) = _holding(torch.zeros(4, 3))
    param.grad = sparse([0, 2], [[1.0, 2.0, -9.0], [0.0, 0.0, 1.0]], 4)
    assert read(collect([param], allow_fp16=False), CPU).amax().item() == 9.0


@pytest.mark.parametrize(
    "grad",
    [torch.ones(2, 1).expand(2, 3), torch.ones(()).expand(5), torch.ones(1).expand(4)],
    ids=["rows", "scalar", "vector"],
)
def test_an_expanded_gradient_is_written_out(grad):
    (param,) = _holding(torch.zeros(grad.shape))
    param.grad = grad
    (tensor,) = collect([param], allow_fp16=False).tensors
    assert param.grad is tensor
    assert param.grad.is_contiguous()
    assert torch.equal(param.grad, grad)


def test_a_negated_gradient_is_written_out():
    (param,) = _holding(torch._neg_view(torch.tensor([1.0, -2.0])))
    gradients = collect([param], allow_fp16=False)
    assert not param.grad.is_neg()
    assert gradients.tensors[0].tolist() == param.grad.tolist() == [-1.0, 2.0]


def test_a_conjugated_gradient_is_written_out():
    (param,) = _holding(torch.tensor([1.0 + 2.0j]).conj())
    gradients = collect([param], allow_fp16=False)
    assert gradients.tensors[0].tolist() == [[1.0, -2.0]]
    gradients.tensors[0].mul_(2.0)
    assert param.grad.tolist() == [2.0 - 4.0j]


def test_a_gradient_of_inference_mode_is_written_out():
    (param,) = _holding(torch.zeros(2))
    with torch.inference_mode():
        param.grad = torch.tensor([1.0, 2.0])
    gradients = collect([param], allow_fp16=False)
    assert not param.grad.is_inference()
    assert gradients.tensors[0].tolist() == [1.0, 2.0]


def test_a_dimension_of_one_does_not_make_a_gradient_expanded():
    (param,) = _holding(torch.zeros(3, 1))
    param.grad = grad = torch.ones(3).as_strided((3, 1), (1, 0))
    collect([param], allow_fp16=False)
    assert param.grad is grad


@pytest.mark.parametrize("alias", [lambda g: g, torch.Tensor.detach, lambda g: g[:]])
def test_a_shared_gradient_is_entered_once(alias):
    a, b = _holding(torch.ones(3), torch.ones(3))
    b.grad = alias(a.grad)
    found = collect([a, b], allow_fp16=False)
    assert (found.present, len(found.tensors), found.shared) == (2, 1, True)


def test_slices_of_one_buffer_are_gradients_of_their_own():
    buffer = torch.ones(6)
    a, b = _holding(torch.zeros(4), torch.zeros(2))
    a.grad, b.grad = buffer[:4], buffer[4:]
    found = collect([a, b], allow_fp16=False)
    assert (len(found.tensors), found.shared) == (2, False)


@pytest.mark.parametrize(
    "second",
    [
        lambda buffer: buffer.view(2, 3),
        lambda buffer: buffer[:2],
        lambda buffer: buffer[1:3],
        lambda buffer: buffer[5:],
    ],
    ids=["shape", "beginning", "middle", "end"],
)
def test_gradients_that_overlap_are_refused_by_name(second):
    buffer = torch.ones(6)
    other = second(buffer)
    a, b = _holding(torch.zeros(6), torch.zeros(other.shape))
    a.grad, b.grad = buffer, other
    optimizer = torch.optim.SGD([a, b], lr=1.0)
    with pytest.raises(GradientError, match=r"\['params'\]\[[01]\].*overlaps.*GS106"):
        collect([a, b], allow_fp16=False, names=(optimizer,))


def test_a_dtype_that_cannot_be_unscaled_is_refused_by_name():
    param = torch.nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
    param.grad = torch.zeros(2).to(torch.float8_e4m3fn)
    optimizer = torch.optim.SGD([param], lr=1.0)
    with pytest.raises(GradientError, match=r"\[0\].*float8_e4m3fn.*keep it out"):
        collect([param], allow_fp16=False, names=(optimizer,))


def test_a_complex_sparse_gradient_is_refused_by_name():
    param = parameter(4, dtype=torch.complex64)
    param.grad = sparse([1], [1 + 1j], 4)
    optimizer = torch.optim.SGD([param], lr=1.0)
    with pytest.raises(GradientError, match=r"\[0\] has a complex sparse gradient"):
        collect([param], allow_fp16=False, names=(optimizer,))


def test_what_a_collective_has_yet_to_deliver_is_waited_for():
    inner = torch.tensor([1.0, INF])
    params = _holding(inner)
    params[0].grad = AsyncCollectiveTensor(inner)
    (tensor,) = collect(params, allow_fp16=False).tensors
    assert type(tensor) is torch.Tensor
    assert tensor.data_ptr() == inner.data_ptr()
    assert read(collect(params, allow_fp16=False), CPU).nonfinite(ONE) == 1.0


def test_a_gradient_without_memory_of_its_own_is_refused_by_name():
    inner = torch.ones(2)
    params = _holding(inner)
    params[0].grad = TwoTensor(inner, inner)
    with pytest.raises(GradientError, match="has a gradient of class TwoTensor"):
        collect(params, allow_fp16=False)


def test_float16_is_refused_with_torchs_words_and_the_names():
    model = torch.nn.Linear(2, 2).half()
    model.weight.grad = torch.ones_like(model.weight)
    model.bias.grad = torch.ones_like(model.bias)
    with pytest.raises(ValueError, match="Attempting to unscale FP16") as caught:
        collect(model.parameters(), allow_fp16=False, names=(model,))
    assert "The gradients of weight, bias are float16." in str(caught.value)
    assert "gradscale.torch.master_weights(optimizer)" in str(caught.value)


def test_of_many_float16_gradients_eight_are_named():
    params = _holding(*(torch.ones(1, dtype=torch.float16) for _ in range(10)))
    optimizer = torch.optim.SGD(params, lr=1.0)
    with pytest.raises(GradientError) as caught:
        collect(params, allow_fp16=False, names=(optimizer,))
    assert "['params'][7] and 2 more are float16" in str(caught.value)


def test_a_subclass_of_tensor_is_read():
    (param,) = _holding(torch.ones(2))
    param.grad = torch.nn.Parameter(torch.tensor([1.0, INF]))
    assert read(collect([param], allow_fp16=False), CPU).nonfinite(ONE).item() == 1.0


def _slices(buffer, *sizes):
    """Return parameters whose gradients are slices of one buffer, as under DDP."""
    return _holding(*buffer[: sum(sizes)].split(sizes))


def test_slices_of_one_buffer_take_the_fast_path(monkeypatch):
    params = _slices(torch.ones(9), 4, 2, 3)
    monkeypatch.setattr(collecting, "_collect_any", None)
    found = collect(params, allow_fp16=False)
    assert all(map(is_, found.tensors, [param.grad for param in params]))
    assert found.kind == (CPU, torch.float32)


def test_slices_that_come_to_overlap_are_refused_after_all():
    params, buffer = _slices(torch.ones(9), 4, 2, 3), torch.ones(9)
    collect(params, allow_fp16=False)
    params[1].grad = buffer[2:4]
    params[2].grad = buffer[3:6]
    with pytest.raises(GradientError, match="overlaps"):
        collect(params, allow_fp16=False)


@pytest.mark.parametrize("what", ["dtype", "order", "sparse", "empty"])
def test_slices_beside_another_kind_have_no_common_kind(what):
    params = _slices(torch.ones(6), 4, 2)
    params += _holding(
        {
            "dtype": torch.ones(2, dtype=torch.float64),
            "order": torch.ones(2, 3).t(),
            "sparse": sparse([0], [1.0], 2),
            "empty": torch.zeros(0),
        }[what]
    )
    assert collect(params, allow_fp16=False).kind is None
