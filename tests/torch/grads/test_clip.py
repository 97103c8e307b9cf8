"""Clipping by norm: of optimizers and parameters, before and after `unscale_`."""

import pytest
import torch

from gradscale import ConfigError, GradientError, GradscaleWarning, OrderError
from gradscale.torch import GradScaler, optim
from tests.torch.clipped import clipped_step, moments, optimizers, targets
from tests.torch.training import (
    FUSED,
    INF,
    NAN,
    PLAIN,
    TOLERANCE,
    backward,
    parameter,
    planted,
)

SGD = torch.optim.SGD
EXACT = TOLERANCE[torch.float32]


@optimizers
@targets
@moments
def test_the_step_is_that_of_torchs_unscale_clip_and_step(make, target, unscale):
    grad, max_norm = [3.0, -4.0, 0.5], 0.75
    _, param, norm = clipped_step(make, grad, max_norm, unscale=unscale, target=target)
    theirs, expected = torch.amp.GradScaler("cpu"), parameter(3)
    optimizer = make([expected], lr=1.0)
    backward(theirs, expected, grad)
    theirs.unscale_(optimizer)
    reference = torch.nn.utils.clip_grad_norm_([expected], max_norm)
    theirs.step(optimizer)
    assert norm.item() == pytest.approx(reference.item(), rel=EXACT)
    assert param.tolist() == pytest.approx(expected.tolist(), rel=EXACT)


@optimizers
@targets
@moments
def test_what_is_below_the_norm_is_left_bit_for_bit(make, target, unscale):
    grad = [3.0, -4.0, 0.1]
    _, clipped, _ = clipped_step(make, grad, 64.0, unscale=unscale, target=target)
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, grad)
    scaler.step(optimizer)
    assert clipped.tolist() == param.tolist()


@targets
@moments
def test_the_norm_is_that_of_the_unscaled_gradients(target, unscale):
    scaler, _, norm = clipped_step(SGD, [3.0, 4.0], 1.0, unscale=unscale, target=target)
    assert norm.item() == 5.0
    assert scaler.last.grad_norm == 5.0


@moments
def test_the_norm_is_a_scalar_f32_without_a_graph(unscale):
    _, _, norm = clipped_step(SGD, [3.0, 4.0], 1.0, unscale=unscale)
    assert (norm.shape, norm.dtype, norm.requires_grad) == ((), torch.float32, False)


def test_the_norm_of_gradients_with_a_graph_has_none():
    scaler, param = GradScaler("cpu"), parameter(2, value=1.0)
    optimizer = SGD([param], lr=1.0)
    (grad,) = torch.autograd.grad(
        scaler.scale(param.pow(3).sum()), [param], create_graph=True
    )
    param.grad = grad
    assert not scaler.clip_grad_norm_(optimizer, 1.0).requires_grad
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.grad_norm == pytest.approx(18.0**0.5, rel=EXACT)


@pytest.mark.parametrize(
    ("norm_type", "norm"), [(1.0, 7.0), (1, 7.0), (2.0, 5.0), (3.0, 91 ** (1 / 3))]
)
@moments
def test_the_order_of_the_norm_can_be_chosen(norm_type, norm, unscale):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, [3.0, -4.0])
    if unscale:
        scaler.unscale_(optimizer)
    seen = scaler.clip_grad_norm_(optimizer, 1.0, norm_type=norm_type)
    assert seen.item() == pytest.approx(norm, rel=EXACT)


@moments
def test_the_norm_of_order_inf_is_the_largest_magnitude(unscale):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, [3.0, -4.0])
    if unscale:
        scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(optimizer, 2.0, INF).item() == 4.0
    scaler.step(optimizer)
    assert param.tolist() == pytest.approx([-1.5, 2.0], rel=2 * EXACT)


@pytest.mark.parametrize("unscaled", ["neither", "first", "second", "both"])
@pytest.mark.parametrize("kind", ["optimizers", "parameters"])
@pytest.mark.parametrize("fused", [False, True])
def test_several_are_clipped_by_their_joint_norm(unscaled, kind, fused):
    scaler, a, b = GradScaler("cpu"), parameter(1), parameter(1)
    first, second = SGD([a], lr=1.0, fused=fused), SGD([b], lr=1.0)
    scaler.scale(planted(a, 3.0) + planted(b, 4.0)).backward()
    if unscaled in ("first", "both"):
        scaler.unscale_(first)
    if unscaled in ("second", "both"):
        scaler.unscale_(second)
    target = [first, second] if kind == "optimizers" else [a, b]
    assert scaler.clip_grad_norm_(target, 2.5).item() == 5.0
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    # 1e-6 is added to the norm, as in torch.
    assert [a.item(), b.item()] == pytest.approx([-1.5, -2.0], rel=1e-6)
    assert scaler.last.grad_norm == 5.0


def test_each_of_several_optimizers_can_be_clipped_on_its_own():
    scaler, a, b = GradScaler("cpu"), parameter(1), parameter(1)
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.scale(planted(a, 4.0) + planted(b, 8.0)).backward()
    norms = [scaler.clip_grad_norm_(first, 2.0), scaler.clip_grad_norm_(second, 1.0)]
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert [norm.item() for norm in norms] == [4.0, 8.0]
    assert [a.item(), b.item()] == pytest.approx([-2.0, -1.0], rel=1e-6)
    assert scaler.last[first].grad_norm == 4.0
    assert scaler.last[second].grad_norm == 8.0


@optimizers
@moments
def test_a_second_clip_works_on_what_the_first_left(make, unscale):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, [3.0, 4.0])
    if unscale:
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 2.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(2.0, rel=1e-6)


def test_unscale_applies_a_clip_that_waits():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, [3.0, 4.0])
    scaler.clip_grad_norm_(optimizer, 2.5)
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-6)
    scaler.step(optimizer)
    assert param.tolist() == pytest.approx([-1.5, -2.0], rel=1e-6)


@optimizers
@targets
@moments
def test_a_clip_to_zero_is_a_step_of_nothing(make, target, unscale):
    scaler, param, norm = clipped_step(
        make, [3.0, 4.0], 0.0, unscale=unscale, target=target
    )
    assert norm.item() == 5.0
    assert param.abs().max().item() == 0.0
    assert scaler.last.applied


@targets
def test_a_clip_at_infinity_only_measures(target):
    _, param, norm = clipped_step(SGD, [3.0, 4.0], INF, unscale=False, target=target)
    assert norm.item() == 5.0
    assert param.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_clip_does_not_outlive_its_iteration(make):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    for clip in (True, False):
        optimizer.zero_grad()
        backward(scaler, param, [3.0, 4.0])
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last.grad_norm is None
    assert param.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_clip_is_folded_into_a_fused_step(make):
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, [3.0, 4.0])
    before, version = param.grad.clone(), param.grad._version
    scaler.clip_grad_norm_(optimizer, 2.5)
    assert torch.equal(param.grad, before)
    assert param.grad._version == version


@targets
def test_a_clip_without_gradients_is_zero_and_harmless(target):
    scaler, param = GradScaler("cpu"), parameter(2)
    scaler.scale(torch.zeros(()))
    optimizer = SGD([param], lr=1.0)
    assert scaler.clip_grad_norm_(target(optimizer, param), 1.0).item() == 0.0
    backward(scaler, param, [3.0, 4.0])
    scaler.step(optimizer)
    assert param.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("target", [[], iter(())], ids=["list", "iterator"])
def test_a_clip_of_nothing_is_zero_as_in_torch(target):
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    assert scaler.clip_grad_norm_(target, 1.0).item() == 0.0


def test_float16_gradients_of_a_fused_optimizer_can_be_clipped():
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2, dtype=torch.float16)
    optimizer = torch.optim.Adam([param], fused=True)
    backward(scaler, param, [3.0, 4.0])
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 5.0
    with pytest.warns(GradscaleWarning, match="it has no float32 masters"):
        scaler.step(optimizer)
    assert param.grad.tolist() == pytest.approx(
        [0.6, 0.8], rel=2 * TOLERANCE[torch.float16]
    )


def test_float16_gradients_of_a_plain_optimizer_are_refused():
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2, dtype=torch.float16)
    backward(scaler, param, 1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.clip_grad_norm_(SGD([param], lr=1.0), 1.0)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda p: SGD(p, lr=1.0), "gradscale.torch.master_weights(optimizer)"),
        (lambda p: torch.optim.Adam(p, fused=True), "clip by scaler.clip_grad_norm_"),
        (optim.AdamW, "clip by scaler.clip_grad_norm_"),
    ],
    ids=["plain", "fused", "own"],
)
def test_float16_gradients_are_not_unscaled_in_place_and_the_remedy_fits(make, remedy):
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2, dtype=torch.float16)
    optimizer = make([param])
    backward(scaler, param, [3.0, 4.0])
    with pytest.raises(GradientError) as caught:
        scaler.unscale_(optimizer)
    assert remedy in str(caught.value)
    assert param.grad.tolist() == [12.0, 16.0]


@targets
def test_a_disabled_scaler_clips_as_torch_does(target):
    scaler, param = GradScaler("cpu", enabled=False), parameter(2)
    planted(param, [3.0, 4.0]).backward()
    optimizer = SGD([param], lr=1.0)
    assert scaler.clip_grad_norm_(target(optimizer, param), 2.5).item() == 5.0
    assert param.grad.tolist() == pytest.approx([1.5, 2.0], rel=1e-6)


@targets
def test_a_clip_before_the_first_loss_is_an_error(target):
    param = parameter(2)
    with pytest.raises(AssertionError, match="Attempted clip_grad_norm_ but _scale is"):
        GradScaler("cpu").clip_grad_norm_(target(SGD([param], lr=1.0), param), 1.0)


def test_a_clip_after_the_step_is_an_error_that_names_the_remedy():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    with pytest.raises(OrderError, match=r"after step\(\) of SGD.*before step.*GS102"):
        scaler.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("max_norm", [-1.0, NAN, "1", None, True])
def test_a_max_norm_that_cannot_be_used_is_refused_by_value(max_norm):
    scaler, param = GradScaler("cpu"), parameter(2)
    with pytest.raises(ConfigError, match=rf"max_norm={max_norm!r} .*GS101"):
        scaler.clip_grad_norm_([param], max_norm)


@pytest.mark.parametrize("norm_type", [0.0, 0.5, -INF, NAN, "2"])
def test_an_order_that_cannot_be_used_is_refused_by_value(norm_type):
    scaler, param = GradScaler("cpu"), parameter(2)
    with pytest.raises(ConfigError, match=rf"norm_type={norm_type!r} .*GS101"):
        scaler.clip_grad_norm_([param], 1.0, norm_type)


def test_a_target_that_cannot_be_clipped_is_refused_by_type():
    with pytest.raises(ConfigError, match=r"was given Linear.*model.parameters\(\)"):
        GradScaler("cpu").clip_grad_norm_(torch.nn.Linear(2, 2), 1.0)


def test_optimizers_and_parameters_together_are_refused():
    param = parameter(2)
    with pytest.raises(ConfigError, match="was given Parameter, SGD"):
        GradScaler("cpu").clip_grad_norm_([SGD([param], lr=1.0), param], 1.0)


def test_a_clip_before_there_are_gradients_does_not_settle_their_scale():
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler.scale(planted(param, 0.5)).backward()
    scaler.reset(optimizer)
    optimizer.zero_grad()
    scaler.update(2.0)
    scaler.clip_grad_norm_(optimizer, 1024.0)
    scaler.scale(planted(param, 0.5)).backward()
    scaler.step(optimizer)
    assert param.tolist() == [-0.25, -0.25]
