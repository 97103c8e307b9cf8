"""The tools of these tests do what they say."""

import pytest
import torch

from gradscale.torch import GradScaler
from tests.torch.training import INF, NAN, backward, parameter, planted


@pytest.mark.parametrize("grad", [1.0, -3.5, INF, -INF])
def test_a_planted_gradient_arrives_as_it_was_asked_for(grad):
    param = parameter(3)
    planted(param, grad).backward()
    assert param.grad.tolist() == [grad] * 3


def test_a_planted_nan_arrives():
    param = parameter(3)
    planted(param, [0.0, NAN, 0.0]).backward()
    assert torch.isnan(param.grad).tolist() == [False, True, False]


def test_a_planted_loss_is_finite_where_its_gradient_is_not():
    assert planted(parameter(3), INF).item() == 0.0


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_a_planted_gradient_has_the_dtype_of_its_parameter(dtype):
    param = parameter(3, dtype=dtype)
    planted(param, 0.5).backward()
    assert param.grad.dtype is dtype
    assert param.grad.tolist() == [0.5] * 3


def test_backward_scales_the_gradient():
    param = parameter(3)
    backward(GradScaler("cpu", init_scale=8.0), param, 0.5)
    assert param.grad.tolist() == [4.0] * 3
