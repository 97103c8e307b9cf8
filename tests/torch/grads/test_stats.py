"""One read of the gradients: finite, the largest magnitude, the norm, who it was."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscale.torch.grads.collect import collect
from gradscale.torch.grads.read_plain import CHUNK, SMALL, read_on_device, read_on_host
from gradscale.torch.grads.stats import read
from tests.torch.training import INF, NAN, TOLERANCE

CPU = torch.device("cpu")
ONE = torch.ones(())
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*REALS, torch.complex64, torch.complex128]
# One below, at and above each bound, and what vectorised loops leave over.
SIZES = [1, 2, 3, 17, SMALL - 1, SMALL, SMALL + 1, CHUNK - 1, CHUNK, CHUNK + 1]


def _holding(*grads):
    """Return parameters that have these gradients."""
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def _read(*grads, norm_type=None):
    return read(collect(_holding(*grads), allow_fp16=True), CPU, norm_type)


def _found(*grads, multiplier=1.0):
    return _read(*grads).nonfinite(torch.tensor(multiplier)).item()


def test_finite_gradients_are_found_finite():
    assert _found(torch.ones(3), torch.zeros(2, 2)) == 0.0


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize(
    ("size", "place"),
    [(n, i) for n in SIZES for i in sorted({0, n // 2 | 1, n - 1} & set(range(n)))],
)
def test_one_bad_element_is_found_wherever_it_lies(size, place, dtype, bad):
    grad = torch.zeros(size, dtype=dtype)
    grad[place] = bad
    assert _found(grad) == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bad_scalar_is_found(dtype, bad):
    assert _found(torch.tensor(bad, dtype=dtype)) == 1.0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("part", ["real", "imag"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_bad_half_of_a_complex_number_is_found(dtype, part, bad):
    grad = torch.ones(5, dtype=dtype)
    getattr(grad, part)[3] = bad
    assert _found(grad) == 1.0


def _transposed(grad):
    return grad.reshape(4, -1).t()


def _every_other(grad):
    wide = torch.full((2 * grad.numel(),), 7.0, dtype=grad.dtype)
    wide[::2] = grad
    return wide[::2]


def _offset(grad):
    wide = torch.full((grad.numel() + 3,), 7.0, dtype=grad.dtype)
    wide[3:] = grad
    return wide[3:]


def _channels_last(grad):
    return grad.reshape(2, 2, -1, 2).contiguous(memory_format=torch.channels_last)


LAYOUTS = [_transposed, _every_other, _offset, _channels_last]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("size", [24, SMALL])
@pytest.mark.parametrize("place", [0, 13, -1])
@pytest.mark.parametrize("bad", [INF, NAN])
def test_one_bad_element_is_found_in_any_layout(layout, size, place, bad):
    grad = torch.ones(size)
    grad[place] = bad
    assert _found(layout(grad)) == 1.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("size", [24, SMALL])
def test_what_lies_between_the_elements_is_not_read(layout, size):
    reading = _read(layout(torch.ones(size)), norm_type=2.0)
    assert reading.amax().item() == 1.0
    assert reading.norm.item() == pytest.approx(
        math.sqrt(size), rel=TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_the_largest_number_of_a_dtype_is_finite(dtype):
    assert _found(torch.full((3,), torch.finfo(dtype).max, dtype=dtype)) == 0.0


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
@settings(max_examples=200, database=None, deadline=None)
def test_a_gradient_is_finite_if_every_element_is(values):
    finite = all(math.isfinite(value) for value in values)
    assert _found(torch.tensor(values)) == float(not finite)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
@settings(max_examples=200, database=None, deadline=None)
def test_amax_is_the_largest_magnitude(values):
    assert _read(torch.tensor(values)).amax().item() == max(map(abs, values))


@given(
    st.lists(st.floats(width=16), min_size=1, max_size=9),
    st.lists(st.floats(width=32), min_size=1, max_size=9),
    st.sampled_from([None, 1.0, 2.0, INF]),
)
@settings(max_examples=200, database=None, deadline=None)
def test_reading_where_it_lies_equals_reading_on_a_device(halves, floats, norm_type):
    for values, dtype in ((halves, torch.float16), (floats, torch.float32)):
        grads = [torch.tensor(values, dtype=dtype), torch.tensor(3.0, dtype=dtype)]
        here = read_on_host(grads, norm_type)
        there = read_on_device(grads, norm_type)
        assert torch.equal(here[0].nan_to_num(-1.0), there[0].nan_to_num(-1.0))
        if norm_type is not None and math.isfinite(here[0]):
            assert here[2].item() == pytest.approx(
                there[2].item(), rel=TOLERANCE[torch.float32]
            )


@pytest.mark.parametrize(
    ("dtype", "peak", "multiplier", "found"),
    [
        (torch.float32, 3e38, 1.0, 0.0),
        (torch.float32, 3e38, 2.0, 1.0),
        (torch.float16, 60000.0, 1.0, 0.0),
        (torch.float16, 60000.0, 2.0, 1.0),
        (torch.bfloat16, 3e38, 2.0, 1.0),
        (torch.float64, 3e38, 2.0, 0.0),
        (torch.float64, 1e300, 1.0, 0.0),
        (torch.float64, 1e300, 1e10, 1.0),
        (torch.complex64, 3e38, 2.0, 1.0),
    ],
)
def test_what_would_overflow_once_multiplied_is_found(dtype, peak, multiplier, found):
    grad = torch.tensor([1.0, -peak], dtype=dtype)
    assert _found(grad, multiplier=multiplier) == found


def test_the_flag_is_exactly_one_for_many_bad_tensors():
    grads = [torch.full((n,), NAN, dtype=d) for n in (1, SMALL) for d in REALS]
    assert _found(*grads) == 1.0


@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_amax_is_taken_over_all_dtypes_and_sizes(dtype):
    grads = [torch.ones(n, dtype=d) for n in (1, SMALL) for d in REALS]
    assert _read(*grads, torch.tensor([-5.0], dtype=dtype)).amax().item() == 5.0


def test_reading_writes_nothing():
    grads = [torch.tensor([1.0, INF]), torch.ones(SMALL), torch.ones(4, 4).t()]
    copies, versions = [g.clone() for g in grads], [g._version for g in grads]
    _read(*grads, norm_type=2.0)
    assert [torch.equal(g, c) for g, c in zip(grads, copies, strict=True)] == [True] * 3
    assert [grad._version for grad in grads] == versions


def test_a_reading_carries_no_graph():
    (param,) = _holding(torch.ones(2))
    param.grad = torch.ones(2, requires_grad=True) * 2.0
    reading = read(collect([param], allow_fp16=False), CPU, 2.0)
    assert not reading.norm.requires_grad
    assert not reading.amax().requires_grad


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("dtype", REALS, ids=str)
def test_a_norm_is_that_of_torch_in_f64(dtype, norm_type):
    made = torch.Generator().manual_seed(1)
    shapes = [(), (1,), (3, 5), (SMALL + 1,), (0,)]
    grads = [torch.randn(s, generator=made, dtype=torch.float64) for s in shapes]
    grads = [grad.to(dtype) for grad in grads]
    flat = torch.cat([grad.double().reshape(-1) for grad in grads])
    expected = torch.linalg.vector_norm(flat, norm_type).item()
    reading = _read(*grads, norm_type=norm_type)
    assert reading.norm.item() == pytest.approx(expected, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("side", [1, 127, 128, 129, 1023, 1024, 1025])
def test_the_norm_of_n_squared_ones_is_n(side):
    # Whole numbers all the way, across the bounds of SMALL and CHUNK.
    assert _read(torch.ones(side * side), norm_type=2.0).norm.item() == side


@pytest.mark.parametrize("value", [1e18, 1e30, 3e38, 1e-18, 1e-22, 1e-30, 1e-40])
@pytest.mark.parametrize("size", [4, SMALL])
def test_squares_neither_overflow_nor_underflow(value, size):
    grad = torch.full((size,), value)
    norm = _read(grad, norm_type=2.0).norm.item()
    expected = grad[0].item() * math.sqrt(size)
    assert norm == pytest.approx(expected, rel=TOLERANCE[torch.float32])


def test_the_norm_of_zeros_is_zero():
    assert _read(torch.zeros(5), norm_type=2.0).norm.item() == 0.0


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, INF])
def test_the_norm_of_bad_gradients_is_not_finite(bad, norm_type):
    norm = _read(torch.tensor([1.0, bad]), norm_type=norm_type).norm
    assert not torch.isfinite(norm)


def test_the_norm_of_complex_numbers_is_that_of_their_halves():
    assert _read(torch.tensor([3 + 4j]), norm_type=2.0).norm.item() == 5.0


def _culprits(*grads, multiplier=1.0):
    params = _holding(*grads)
    reading = read(collect(params, allow_fp16=True), CPU)
    blamed = {id(param) for param in reading.culprits(torch.tensor(multiplier))}
    return [i for i, param in enumerate(params) if id(param) in blamed]


@pytest.mark.parametrize("size", [3, SMALL])
def test_the_culprits_are_the_tensors_that_are_bad(size):
    grads = [torch.ones(size) for _ in range(4)]
    grads[1][0], grads[3][-1] = INF, NAN
    assert _culprits(*grads) == [1, 3]


def test_the_culprits_are_found_among_dtypes():
    grads = [
        torch.tensor([INF if i % 2 else 1.0], dtype=d) for i, d in enumerate(REALS)
    ]
    assert _culprits(*grads) == [1, 3]


def test_nobody_is_to_blame_where_all_is_finite():
    assert _culprits(torch.ones(3), torch.ones(SMALL)) == []


def test_who_overflows_in_unscaling_is_a_culprit():
    assert _culprits(torch.ones(3), torch.tensor([3e38]), multiplier=2.0) == [1]


@pytest.mark.parametrize("size", [3, SMALL])
def test_who_overflows_in_unscaling_by_a_tiny_scale_is_a_culprit(size):
    # 2^92 / 2^-40 is above the largest f32, though 2^92 looks small.
    params = _holding(torch.ones(size), torch.full((size,), 2.0**92))
    scale = torch.tensor(2.0**-40)
    reading = read(collect(params, allow_fp16=True), CPU, scale=scale)
    assert reading.nonfinite(1.0 / scale) == 1.0
    assert [id(p) for p in reading.culprits(1.0 / scale)] == [id(params[1])]


# --- many small tensors on a device ---------------------------------------------------
