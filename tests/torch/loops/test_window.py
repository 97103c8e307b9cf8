"""Accumulation windows under the scaler."""

import pytest
import torch

from gradscale.torch import GradScaler, grads_finite
from tests.torch.training import INF, NAN, OPTIMIZERS, backward, parameter

optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


@optimizers
@pytest.mark.parametrize("bad", [INF, NAN])
def test_an_overflow_is_known_before_the_window_ends(make, bad):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    optimizer = make([param], lr=1.0)
    seen = []
    for grad in (1.0, [bad, 1.0], 1.0):
        backward(scaler, param, grad)
        seen.append(grads_finite(scaler, optimizer))
    scaler.step(optimizer)
    scaler.update()
    assert seen == [True, False, False]
    assert not scaler.last.applied
    assert scaler.get_scale() == 4.0


@optimizers
def test_a_window_that_was_read_steps_on_the_whole_sum(make):
    scaler, param, twin = GradScaler("cpu", init_scale=8.0), parameter(2), parameter(2)
    optimizer, plain = make([param], lr=1.0), make([twin], lr=1.0)
    for grad in (1.0, 2.0, 4.0):
        backward(scaler, param, grad)
        assert grads_finite(scaler, optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    other = GradScaler("cpu", init_scale=8.0)
    backward(other, twin, 7.0)
    other.clip_grad_norm_(plain, 1.0)
    other.step(plain)
    other.update()
    assert torch.equal(param, twin)


def test_no_gradient_is_a_finite_one():
    scaler, param = GradScaler("cpu"), parameter(1)
    scaler.scale(torch.zeros(()))
    assert grads_finite(scaler, torch.optim.SGD([param], lr=1.0))


def test_a_disabled_scaler_reads_nothing():
    scaler, param = GradScaler("cpu", enabled=False), parameter(1)
    param.grad = torch.full((1,), INF)
    assert grads_finite(scaler, torch.optim.SGD([param], lr=1.0))
