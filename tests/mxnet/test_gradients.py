"""One read finds every value that is not finite, of any dtype, layout and device."""

import math

import mxnet as mx
import pytest
from mxnet.contrib.amp.amp import bfloat16

from gradscale.mxnet.gradients import discard_, float16_names, norm, read
from tests.mxnet.nets import INF, NAN, parameter


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_one_bad_element_is_found(dtype, bad, place):
    weight = parameter(values=[0.0] * 1000, dtype=dtype)
    weight.grad()[:] = -3.0
    assert read([weight]).peaks == (3.0,)
    weight.grad()[place] = bad
    reading = read([weight])
    assert not reading.finite
    assert reading.nan == math.isnan(bad)
    assert reading.culprits == ["weight"]


def test_a_bad_element_of_a_bfloat16_gradient_is_found():
    weight = parameter()
    weight._grad = [mx.nd.amp_cast(mx.nd.array([1.0, -2.0]), dtype=bfloat16)]
    assert read([weight]).peaks == (2.0,)
    weight._grad = [mx.nd.amp_cast(mx.nd.array([1.0, NAN]), dtype=bfloat16)]
    assert not read([weight]).finite
    assert float16_names([weight]) == []


def test_float16_gradients_are_named():
    params = [parameter(name=dtype, dtype=dtype) for dtype in ("float16", "float32")]
    assert float16_names(params) == ["float16"]


def test_the_norm_is_that_of_one_device():
    one, other = parameter(devices=2, name="one"), parameter(devices=2, name="other")
    for param, value in ((one, 3.0), (other, 4.0)):
        for grad in param.list_grad():
            grad[:] = [value, 0.0]
    params = [one, other]
    assert norm(params, read(params)) == 5.0


def test_a_large_float64_gradient_is_finite():
    weight = parameter(dtype="float64")
    weight.grad()[:] = 1e300
    assert read([weight]).amax == pytest.approx(1e300)


def test_sparse_gradients_are_read_by_their_rows():
    weight = mx.gluon.Parameter("rows", shape=(4, 2), grad_stype="row_sparse")
    weight.initialize()
    assert read([weight]).peaks == (0.0,)
    rows = mx.nd.array([[3.0, -5.0]]), [2]
    mx.nd.sparse.row_sparse_array(rows, shape=(4, 2)).copyto(weight.grad())
    assert read([weight]).peaks == (5.0,)
    assert norm([weight], read([weight])) == pytest.approx(math.sqrt(34.0))
    rows = mx.nd.array([[3.0, NAN]]), [1]
    mx.nd.sparse.row_sparse_array(rows, shape=(4, 2)).copyto(weight.grad())
    assert not read([weight]).finite


def test_frozen_and_uninitialized_parameters_have_no_gradient():
    frozen = parameter(name="frozen")
    frozen.grad_req = "null"
    later = mx.gluon.Parameter("later", shape=(0,), allow_deferred_init=True)
    later.initialize()
    assert read([frozen, later]).peaks == ()


def test_arrays_of_the_numpy_interface_are_read():
    mx.npx.set_np()
    try:
        weight = mx.gluon.Parameter("weight", shape=(2,))
        weight.initialize()
        weight.grad()[:] = 2.0
        assert read([weight]).peaks == (2.0,)
    finally:
        mx.npx.reset_np()


@pytest.mark.parametrize("peak", [1e-30, 1.0, 3e38])
def test_the_norm_neither_overflows_nor_underflows(peak):
    weight = parameter(values=[0.0] * 4)
    weight.grad()[:] = peak
    found = norm([weight], read([weight]))
    assert found == pytest.approx(2.0 * float(weight.grad()[0].asscalar()))


def test_discarded_sparse_gradients_are_0():
    weight = mx.gluon.Parameter("rows", shape=(4, 2), grad_stype="row_sparse")
    weight.initialize()
    rows = mx.nd.array([[3.0, NAN]]), [1]
    mx.nd.sparse.row_sparse_array(rows, shape=(4, 2)).copyto(weight.grad())
    discard_([weight])
    assert weight.grad().stype == "row_sparse"
    assert weight.grad().asnumpy().tolist() == [[0.0, 0.0]] * 4


def test_discarded_gradients_are_0_and_used():
    weight = parameter(devices=2)
    with mx.autograd.record():
        losses = [(data * INF).sum() for data in weight.list_data()]
    mx.autograd.backward(losses)
    discard_([weight])
    assert read([weight]).peaks == (0.0, 0.0)
    assert not any(data._fresh_grad for data in weight.list_data())
