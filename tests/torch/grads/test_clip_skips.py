"""A norm that cannot be used is a skip with its own code, never a zero update."""

import pytest
import torch

from gradscale import Verdict
from gradscale.torch import GradScaler, optim
from tests.torch.clipped import clipped_step, moments, optimizers, targets
from tests.torch.training import (
    FUSED,
    INF,
    NAN,
    TOLERANCE,
    backward,
    parameter,
)

SGD = torch.optim.SGD
EXACT = TOLERANCE[torch.float32]


@optimizers
@targets
@moments
def test_a_norm_that_overflows_is_a_skip_with_its_own_code(make, target, unscale):
    scaler, param, norm = clipped_step(
        make, [3e38] * 4, 1.0, unscale=unscale, target=target, init_scale=1.0
    )
    assert norm.item() == INF
    assert param.abs().max().item() == 0.0
    assert not scaler.last.applied
    assert scaler.last.verdict is Verdict.NORM_OVERFLOW
    assert scaler.last.verdict.code == "GS204"
    assert scaler.get_scale() == 0.5
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("make", [SGD, optim.SGD], ids=["torch", "own"])
def test_a_clip_of_bare_parameters_is_about_their_optimizer_alone(make, unscale):
    scaler = GradScaler("cpu", init_scale=4.0)
    bad, good = parameter(2), parameter(2)
    first, second = make([bad], lr=1.0), make([good], lr=1.0)
    backward(scaler, bad, [INF, 1.0])
    backward(scaler, good, [3.0, 4.0])
    if unscale:
        scaler.unscale_(first)
        scaler.unscale_(second)
    scaler.clip_grad_norm_([bad], 1.0)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert bad.tolist() == [0.0, 0.0]
    assert good.tolist() == [-3.0, -4.0]
    assert (scaler.last[first].applied, scaler.last[second].applied) == (False, True)
    assert scaler.last[second].grad_norm is None


def test_the_order_of_the_steps_does_not_matter_once_they_are_known():
    scaler = GradScaler("cpu", init_scale=4.0)
    clipped, other = parameter(2), parameter(2)
    first, second = SGD([clipped], lr=1.0), SGD([other], lr=1.0)
    for grad in (1.0, INF):
        clipped.grad = other.grad = None
        backward(scaler, clipped, grad)
        backward(scaler, other, 1.0)
        scaler.clip_grad_norm_([clipped], 1e9)
        scaler.step(second)
        scaler.step(first)
        scaler.update()
    assert other.tolist() == [-2.0, -2.0]
    assert clipped.tolist() == [-1.0, -1.0]


def test_a_clip_of_parameters_that_no_optimizer_has_counts_for_all():
    scaler, param, master = (
        GradScaler("cpu", 1.0),
        parameter(4),
        parameter(4, value=1.0),
    )
    optimizer = SGD([master], lr=0.1, weight_decay=0.5)
    scaler.scale(torch.zeros(()))
    param.grad = torch.full((4,), 3e38)
    assert scaler.clip_grad_norm_([param], 1.0).item() == INF
    master.grad = param.grad.clone()
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert master.tolist() == [1.0] * 4


def test_clips_of_bare_parameters_count_where_they_belong_each():
    scaler = GradScaler("cpu", init_scale=4.0)
    params = [parameter(2), parameter(2)]
    optimizers = [SGD([param], lr=1.0) for param in params]
    for param, grad in zip(params, ([3.0, 4.0], [6.0, 8.0]), strict=True):
        backward(scaler, param, grad)
        scaler.clip_grad_norm_([param], 1.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [scaler.last[optimizer].grad_norm for optimizer in optimizers] == [5.0, 10.0]
    for param in params:
        assert param.tolist() == pytest.approx([-0.6, -0.8], rel=EXACT)


@targets
@moments
def test_a_norm_that_overflows_only_while_scaled_is_no_overflow(target, unscale):
    # Scaled, 64 elements of 2**126 have a norm of 2**129; unscaled, of 8.
    scaler, param, norm = clipped_step(
        SGD, [1.0] * 64, 16.0, unscale=unscale, target=target, init_scale=2.0**126
    )
    assert norm.item() == 8.0
    assert param.tolist() == [-1.0] * 64
    assert scaler.last.applied


@targets
@moments
def test_squares_that_overflow_do_not_make_the_norm_overflow(target, unscale):
    scaler, param, norm = clipped_step(
        SGD, [1e18] * 1000, 1.0, unscale=unscale, target=target, init_scale=1.0
    )
    assert norm.item() == pytest.approx(1e18 * 1000**0.5, rel=EXACT)
    assert param[0].item() == pytest.approx(-(1000**-0.5), rel=EXACT)
    assert scaler.last.applied


@moments
@pytest.mark.parametrize("make", [SGD, *FUSED.values()], ids=["SGD", *FUSED])
def test_a_coefficient_that_underflows_is_a_skip_and_no_zero_update(make, unscale):
    scaler, param, _ = clipped_step(
        make, [1e37, 0.0], 1e-3, unscale=unscale, init_scale=1.0
    )
    assert param.tolist() == [0.0, 0.0]
    assert not scaler.last.applied
    assert scaler.last.verdict is Verdict.NORM_OVERFLOW


@optimizers
@targets
@moments
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bad_gradient_is_a_skip_and_not_blamed_on_the_norm(
    make, target, unscale, bad
):
    scaler, param, norm = clipped_step(
        make, [bad, 1.0], 1.0, unscale=unscale, target=target
    )
    assert not torch.isfinite(norm)
    assert param.tolist() == [0.0, 0.0]
    assert scaler.last.verdict is Verdict.CALIBRATING
