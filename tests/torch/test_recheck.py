"""What is written into the gradients after `unscale_`: applied, or checked again."""

import pytest
import torch

from gradscale import Verdict
from gradscale.errors import GradscaleWarning
from gradscale.torch import GradScaler
from tests.torch.training import INF, NAN, OPTIMIZERS, backward, parameter

optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def _spoilt(make, spoil, *, recheck, grad=1.0, scale=8.0):
    scaler = GradScaler("cpu", init_scale=scale, recheck=recheck)
    param = parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, grad)
    scaler.unscale_(optimizer)
    spoil(param.grad)
    scaler.step(optimizer)
    scaler.update()
    return scaler, param


@optimizers
@pytest.mark.parametrize("bad", [INF, NAN])
def test_by_default_it_is_applied_as_in_torch(make, bad):
    scaler, param = _spoilt(make, lambda grad: grad.fill_(bad), recheck=False)
    assert not torch.isfinite(param).any()
    assert scaler.get_scale() == 8.0


@optimizers
@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("place", [0, 1])
def test_with_recheck_it_is_a_skip(make, bad, place):
    def spoil(grad):
        grad[place] = bad

    scaler, param = _spoilt(make, spoil, recheck=True)
    assert param.tolist() == [0.0, 0.0]
    assert not scaler.last.applied
    assert scaler.last.verdict is Verdict.CALIBRATING
    assert scaler.last.culprits == ("param_groups[0]['params'][0]",)
    assert scaler.get_scale() == 4.0


@optimizers
def test_with_recheck_an_untouched_gradient_is_applied(make):
    scaler, param = _spoilt(make, lambda grad: None, recheck=True)
    assert scaler.last.applied
    assert param[0].item() < 0.0


@optimizers
def test_with_recheck_a_finite_change_is_applied(make):
    scaler, _ = _spoilt(make, lambda grad: grad.mul_(0.5), recheck=True)
    assert scaler.last.applied


@optimizers
@pytest.mark.parametrize("recheck", [False, True])
def test_an_inf_that_was_repaired_is_still_a_skip_and_an_overflow(make, recheck):
    scaler, param = _spoilt(
        make, lambda grad: grad.nan_to_num_(0.0, 0.0, 0.0), recheck=recheck, grad=INF
    )
    assert param.tolist() == [0.0, 0.0]
    assert not scaler.last.applied
    assert scaler.last.verdict is Verdict.CALIBRATING


def test_amax_stays_that_of_the_scaled_gradients():
    scaler, _ = _spoilt(torch.optim.SGD, lambda grad: grad.mul_(0.5), recheck=True)
    assert scaler.last.amax == 8.0


def test_without_unscale_there_is_nothing_to_check_again():
    scaler, param = GradScaler("cpu", recheck=True, init_scale=8.0), parameter(2)
    backward(scaler, param, 1.0)
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert param.tolist() == [-1.0, -1.0]


@optimizers
def test_without_gradients_there_is_nothing_to_check_again(make):
    scaler, param = GradScaler("cpu", recheck=True), parameter(2)
    optimizer = make([param], lr=1.0)
    scaler.scale(torch.zeros((), requires_grad=True))
    scaler.unscale_(optimizer)
    with pytest.warns(GradscaleWarning, match="has a gradient"):
        assert scaler.step(optimizer) is None
    assert param.tolist() == [0.0, 0.0]
