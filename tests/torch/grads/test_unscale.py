"""Multiplying gradients in place."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.torch import GradScaler
from gradscale.torch.grads.unscale import multiply_
from tests.torch.training import (
    OPTIMIZERS,
    TOLERANCE,
    backward,
    iterate,
    parameter,
    planted,
    sparse,
)

REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
SGD = torch.optim.SGD


def _same_bits(a, b):
    return torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


def test_the_inverse_of_a_power_of_two_is_exact():
    powers = [2.0**exponent for exponent in range(-126, 127)]
    assert inverse(torch.tensor(powers)).tolist() == powers[::-1]


@given(st.floats(2.0**-24, 2.0**126, width=32))
@settings(max_examples=200, database=None, deadline=None)
def test_the_inverse_is_torchs_inverse_by_way_of_f64(scale):
    scale = torch.tensor(scale)
    assert inverse(scale).item() == scale.double().reciprocal().float().item()


# Bits of the mantissa, exponents of the smallest number and of the first too large.
RANGE = {
    torch.float16: (11, -24, 16),
    torch.bfloat16: (8, -133, 128),
    torch.float32: (24, -149, 128),
    torch.float64: (53, -1074, 1024),
}


@st.composite
def _in_range(draw):
    """Return gradients and an exponent by which they can be scaled without loss."""
    dtype = draw(st.sampled_from(REALS))
    bits, low, top = RANGE[dtype]
    exponent = draw(st.integers(-24, min(126, top - low - bits)))
    place = draw(st.integers(max(low, low - exponent), min(top, top - exponent) - bits))
    most = 2**bits - 1
    whole = draw(st.lists(st.integers(-most, most), min_size=1, max_size=8))
    values = [math.ldexp(number, place) for number in whole] + [-0.0]
    return torch.tensor(values, dtype=torch.float64).to(dtype), exponent


@given(_in_range())
@settings(max_examples=300, database=None, deadline=None)
def test_unscale_of_scale_is_the_identity_bit_for_bit(case):
    grads, exponent = case
    back = (grads.double() * 2.0**exponent).to(grads.dtype)
    multiply_([back], inverse(torch.tensor(2.0**exponent)))
    assert _same_bits(back, grads)


@pytest.mark.parametrize("make", [SGD, torch.optim.Adam], ids=["SGD", "Adam"])
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float16, k) for k in (-4, 0, 1, 10)]
    + [(dtype, k) for dtype in REALS[1:] for k in (-24, 0, 1, 16, 126)],
    ids=str,
)
def test_a_scaled_loss_leaves_the_gradient_of_the_loss(dtype, exponent, make):
    scaler = GradScaler("cpu", init_scale=2.0**exponent, allow_fp16=True)
    wanted = torch.tensor([1.5, -0.0, 2.0**-3, -1.0], dtype=dtype)
    param = parameter(4, dtype=dtype)
    optimizer = make([param])
    backward(scaler, param, wanted)
    scaler.unscale_(optimizer)
    assert _same_bits(param.grad, wanted)


@given(
    st.sampled_from(REALS),
    st.floats(2.0**-6, 4.0),
    st.floats(1.0, 1000.0, width=32),
)
@settings(max_examples=200, database=None, deadline=None)
def test_any_scale_comes_back_within_the_rounding(dtype, value, scale):
    grads = torch.tensor([value], dtype=torch.float64).to(dtype)
    back = (grads.double() * scale).to(dtype)
    multiply_([back], inverse(torch.tensor(scale)))
    # One rounding on the way out and one on the way back.
    limit = 2 * TOLERANCE[dtype]
    assert back.item() == pytest.approx(grads.item(), rel=limit)


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_a_multiplier_too_small_for_the_dtype_is_not_rounded_first(dtype):
    # 2**-25 is 0 in f16; 2**12 * 2**-25 is not.
    grads = torch.tensor([2.0**12], dtype=dtype)
    multiply_([grads], torch.tensor(2.0**-25))
    assert grads.item() == 2.0**-13


def test_dtypes_and_shapes_can_be_mixed():
    grads = [torch.full(s, 8.0, dtype=d) for d in REALS for s in ((), (3,), (2, 2))]
    multiply_(grads, torch.tensor(0.25))
    assert {value for grad in grads for value in grad.reshape(-1).tolist()} == {2.0}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_multiplier_may_have_one_dimension(shape):
    grads = torch.full((3,), 8.0)
    multiply_([grads], torch.full(shape, 0.25))
    assert grads.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "view", [lambda w: w[::2], lambda w: w[3:], lambda w: w.view(4, 2).t()]
)
def test_what_lies_between_the_elements_is_left_alone(view):
    whole = torch.full((8,), 8.0)
    part = view(whole)
    expected = whole.clone()
    view(expected).mul_(0.25)
    multiply_([part], torch.tensor(0.25))
    assert torch.equal(whole, expected)


def test_nothing_is_multiplied_where_nothing_is_given():
    multiply_([], torch.tensor(0.25))


@pytest.mark.parametrize("name", ["transposed", "strided", "scalar", "empty"])
def test_unscale_handles_every_layout(name):
    grad = {
        "transposed": torch.full((3, 2), 4.0).t(),
        "strided": torch.full((6,), 4.0)[::2],
        "scalar": torch.tensor(4.0),
        "empty": torch.zeros(0),
    }[name]
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(*grad.shape)
    scaler.scale(torch.zeros(()))
    param.grad = grad
    scaler.unscale_(SGD([param], lr=1.0))
    assert param.grad.shape == grad.shape
    assert set(param.grad.reshape(-1).tolist()) <= {1.0}


def test_a_sparse_gradient_is_unscaled_in_its_values():
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(4)
    scaler.scale(torch.zeros(()))
    param.grad = sparse([1, 3, 1], [4.0, 8.0, 4.0], 4)
    scaler.step(SGD([param], lr=1.0))
    assert param.tolist() == [0.0, -2.0, 0.0, -2.0]


def test_a_sparse_embedding_trains():
    scaler = GradScaler("cpu", init_scale=4.0)
    table = torch.nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(torch.optim.SparseAdam(table.parameters(), lr=0.5))
    scaler.update()
    moved = (table.weight != before).any(dim=1).tolist()
    assert moved == [False, True, False, True, False]


def test_float16_gradients_are_unscaled_by_choice():
    scaler = GradScaler("cpu", init_scale=4.0, allow_fp16=True)
    param = parameter(2, dtype=torch.float16)
    iterate(scaler, SGD([param], lr=1.0), param, 0.5)
    assert param.tolist() == [-0.5, -0.5]


def test_bfloat16_gradients_are_unscaled():
    scaler, param = GradScaler("cpu"), parameter(2, dtype=torch.bfloat16)
    iterate(scaler, SGD([param], lr=1.0), param, 0.5)
    assert param.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_second_optimizer_of_a_parameter_gets_it_unscaled(make):
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    first, second = make([param], lr=1.0), SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(first)
    moved = param[0].item()
    scaler.step(second)
    assert param[0].item() == moved - 1.0


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_second_optimizer_gets_it_unscaled_though_the_first_skips(make):
    scaler = GradScaler("cpu", init_scale=4.0)
    shared, other = parameter(2), parameter(2)
    first, second = make([shared, other], lr=1.0), SGD([shared], lr=1.0)
    scaler.scale(planted(shared, 1.0) + planted(other, float("inf"))).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert other.tolist() == [0.0, 0.0]
    assert shared.tolist() == [-1.0, -1.0]


def test_a_gradient_changed_between_two_optimizers_is_refused_by_name():
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    first, second = SGD([param], lr=1.0), SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(first)
    param.grad.mul_(2.0)
    with pytest.raises(
        ValueError, match=r"\['params'\]\[0\] belongs to two optimizers"
    ):
        scaler.step(second)
