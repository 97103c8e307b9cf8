"""What is open between two updates, and what an update in between does to it."""

from functools import partial

import pytest
import torch

from gradscale import GradscaleWarning, OrderError
from gradscale.torch import GradScaler
from gradscale.torch.grads import stats
from gradscale.torch.optim import SGD as OwnSGD
from gradscale.torch.step.iteration import Iteration
from tests.torch.training import OPTIMIZERS, backward, parameter, planted

SGD = torch.optim.SGD
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def _alone(make, *, clip=None, gradient=1.0):
    """Return what one step at a scale of 4 leaves of a parameter."""
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, gradient)
    if clip is not None:
        scaler.clip_grad_norm_(optimizer, clip)
    scaler.step(optimizer)
    return param.tolist()


def _two(make):
    """Return a scaler that grows with each update, and two optimizers' gradients."""
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    a, b = parameter(2), parameter(2)
    first, second = SGD([a], lr=1.0), make([b], lr=1.0)
    scaler.scale(planted(a, 1.0) + planted(b, 1.0)).backward()
    return scaler, first, second, b


@optimizers
def test_after_an_update_the_second_is_unscaled_with_the_scale_of_its_backward(make):
    scaler, first, second, b = _two(make)
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    scaler.update()
    assert b.tolist() == _alone(make)
    assert scaler.last[second].scale == 4.0


@optimizers
def test_unscale_after_an_update_uses_the_scale_of_the_backward(make):
    scaler, first, second, b = _two(make)
    scaler.step(first)
    scaler.update()
    scaler.unscale_(second)
    assert b.grad.tolist() == [1.0, 1.0]


@optimizers
def test_a_clip_after_an_update_uses_the_scale_of_the_backward(make):
    scaler, first, second, b = _two(make)
    scaler.step(first)
    scaler.update()
    norm = scaler.clip_grad_norm_(second, 8.0)
    assert norm.item() == torch.tensor(2.0).sqrt().item()
    scaler.step(second)
    assert b.tolist() == _alone(make)


@optimizers
def test_looking_at_the_flags_before_the_update_changes_nothing(make):
    scaler, first, second, b = _two(make)
    assert scaler._found_inf_per_device(second) == {}
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    assert b.tolist() == _alone(make)


@optimizers
def test_a_clip_before_the_update_is_not_lost(make):
    scaler, first, second, b = _two(make)
    scaler.clip_grad_norm_(second, 0.25)
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    assert b.tolist() == _alone(make, clip=0.25)


@optimizers
def test_what_was_unscaled_before_the_update_is_not_unscaled_again(make):
    scaler, first, second, b = _two(make)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    assert b.tolist() == _alone(make)


def test_a_loss_multiplied_by_hand_is_unscaled_with_the_scale_of_now():
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    param = parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    (planted(param, 1.0) * scaler.get_scale()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-2.0, -2.0]
    assert scaler.last.scale == 8.0


@pytest.mark.parametrize("whole", [True, False], ids=["optimizer", "parameters"])
def test_a_loss_multiplied_by_hand_is_clipped_with_the_scale_of_now(whole):
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    param = parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    (planted(param, [3.0, 4.0]) * scaler.get_scale()).backward()
    target = optimizer if whole else [param]
    assert scaler.clip_grad_norm_(target, 64.0).item() == 5.0


def test_the_outcome_of_the_last_step_is_kept_when_the_scale_is_set():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    scaler.update()
    scaler.update(8.0)
    assert scaler.last.applied


@optimizers
def test_gradients_that_did_not_change_are_read_once(make, monkeypatch):
    reads = []
    real = stats.read_on_host
    monkeypatch.setattr(
        stats, "read_on_host", lambda *given: reads.append(1) or real(*given)
    )
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert len(reads) == 1


def test_gradients_that_changed_after_a_clip_are_read_again():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    param.grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert param.tolist() == [0.0, 0.0]


def test_a_gradient_that_was_replaced_after_a_clip_is_read_again():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    param.grad = torch.full((2,), float("nan"))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied


@pytest.mark.parametrize("updates", [1, 2, 3])
@pytest.mark.parametrize("begin", ["unscale_", "clip"])
@optimizers
def test_a_step_that_was_begun_is_kept_over_any_number_of_updates(make, begin, updates):
    scaler, first, second, b = _two(make)
    if begin == "unscale_":
        scaler.unscale_(second)
    else:
        scaler.clip_grad_norm_(second, 64.0)
    for _ in range(updates):
        scaler.step(first)
        scaler.update()
        first.zero_grad()
        backward(scaler, first.param_groups[0]["params"][0], 1.0)
    scaler.step(second)
    assert b.tolist() == _alone(make)


@optimizers
def test_an_optimizer_may_be_unscaled_in_every_iteration_and_never_step(make):
    scaler, param, idle = GradScaler("cpu"), parameter(2), make([parameter(2)])
    optimizer = SGD([param], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        backward(scaler, param, 1.0)
        scaler.unscale_(idle)
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [-3.0, -3.0]


@optimizers
def test_an_iteration_without_gradients_does_not_swallow_the_next(make):
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    optimizer = make([param], lr=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.clip_grad_norm_(optimizer, 64.0).item() == 0.0
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied
    assert param.tolist() == _alone(make)


@pytest.mark.parametrize("whole", [True, False], ids=["optimizer", "parameters"])
@optimizers
def test_what_was_unscaled_before_the_update_is_clipped_as_it_is(make, whole):
    scaler, first, second, b = _two(make)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    norm = scaler.clip_grad_norm_(second if whole else [b], 64.0)
    assert norm.item() == torch.tensor(2.0).sqrt().item()
    scaler.step(second)
    assert b.tolist() == _alone(make)


@optimizers
def test_unscaling_again_what_was_never_used_divides_once(make):
    scaler, first, second, b = _two(make)
    for _ in range(2):
        scaler.unscale_(second)
        scaler.step(first)
        scaler.update()
        first.zero_grad()
        backward(scaler, first.param_groups[0]["params"][0], 1.0)
    assert b.grad.tolist() == [1.0, 1.0]


@optimizers
def test_new_gradients_end_what_was_carried_over(make):
    scaler, first, second, b = _two(make)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    second.zero_grad()
    backward(scaler, b, 1.0)
    assert b.grad.tolist() == [8.0, 8.0]
    scaler.step(second)
    assert b.tolist() == _alone(make)


@pytest.mark.filterwarnings("ignore:.*GS103")
@optimizers
def test_an_idle_step_of_one_does_not_move_the_scale_behind_the_other(make):
    scaler, b = GradScaler("cpu", init_scale=4.0), parameter(2)
    idle, second = SGD([parameter(2)], lr=1.0), make([b], lr=1.0)
    backward(scaler, b, 1.0)
    scaler.step(idle)
    scaler.update(2.0)
    scaler.step(idle)
    scaler.step(second)
    assert b.tolist() == _alone(make)


@optimizers
def test_a_step_that_was_begun_keeps_its_scale_when_another_loss_is_scaled(make):
    scaler, b = GradScaler("cpu", init_scale=4.0), parameter(2)
    second = make([b], lr=1.0)
    backward(scaler, b, 1.0)
    scaler.update(2.0)
    scaler.clip_grad_norm_(second, 64.0)
    backward(scaler, parameter(2), 1.0)
    scaler.step(second)
    assert b.tolist() == _alone(make)


@optimizers
def test_unscaling_twice_after_an_update_is_an_error_as_in_torch(make):
    scaler, first, second, _ = _two(make)
    scaler.step(first)
    scaler.update()
    scaler.unscale_(second)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(second)


@optimizers
def test_unscaling_after_a_step_that_was_cut_short_is_an_error_as_in_torch(make):
    scaler, first, second, _ = _two(make)
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    with pytest.raises(RuntimeError, match="is being called after step"):
        scaler.unscale_(second)


@optimizers
def test_gradients_that_wait_are_brought_to_the_scale_of_the_loss_added_to_them(make):
    scaler, first, second, b = _two(make)
    scaler.unscale_(first)
    scaler.clip_grad_norm_(second, 64.0)
    scaler.step(second)
    scaler.update()
    second.zero_grad()
    scaler.scale(planted(b, 0.5)).backward()
    scaler.step(first)
    scaler.update()
    backward(scaler, b, 0.25)
    # 0.5 at a scale of 8 and 0.25 at 16, both of them at 16.
    assert b.grad.tolist() == [12.0, 12.0]
    scaler.unscale_(second)
    assert b.grad.tolist() == [0.75, 0.75]


def test_gradients_made_after_the_step_and_before_the_update_keep_their_scale():
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    param = parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    optimizer.zero_grad()
    backward(scaler, param, 0.5)
    scaler.update()
    scaler.step(optimizer)
    assert param.tolist() == [-1.5, -1.5]


@pytest.mark.parametrize(
    "make",
    [SGD, partial(SGD, fused=True), OwnSGD],
    ids=["plain", "fused", "own"],
)
def test_a_second_step_on_used_gradients_takes_them_as_the_first_left_them(make):
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    param = parameter(2)
    optimizer = make([param], lr=1.0)
    for _ in range(2):
        if param.grad is None:
            backward(scaler, param, 1.0)
        scaler.step(optimizer)
        scaler.update()
        backward(scaler, parameter(2), 1.0)
    assert param.tolist() == [-2.0, -2.0]


def test_a_step_after_an_unscale_that_found_no_gradient_is_taken():
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    optimizer = SGD([param], lr=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    backward(scaler, param, 1.0)
    scaler.step(optimizer)
    assert param.tolist() == [-1.0, -1.0]


@optimizers
def test_an_optimizer_first_seen_after_an_update_keeps_the_scale_of_its_gradients(make):
    scaler, first, second, b = _two(make)
    scaler.step(first)
    scaler.update()
    first.zero_grad()
    backward(scaler, first.param_groups[0]["params"][0], 1.0)
    scaler.step(second)
    assert b.tolist() == _alone(make)


def test_gradients_of_two_scales_of_an_optimizer_first_seen_add_up_at_one():
    scaler, first, second, b = _two(SGD)
    scaler.step(first)
    scaler.update()
    backward(scaler, b, 1.0)
    scaler.step(second)
    assert b.tolist() == [-2.0, -2.0]


def test_written_gradients_of_an_optimizer_first_seen_are_reported():
    scaler, first, second, b = _two(SGD)
    scaler.step(first)
    scaler.update()
    b.grad.add_(0.0)
    backward(scaler, b, 1.0)
    with pytest.warns(GradscaleWarning, match=r"moved the scale.*GS104"):
        scaler.step(second)


def test_gradients_of_two_scales_are_an_error_where_that_was_asked_for():
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1, guard="raise")
    a, b = parameter(2), parameter(2)
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.scale(planted(a, 1.0) + planted(b, 1.0)).backward()
    scaler.step(first)
    scaler.update()
    b.grad.add_(0.0)
    backward(scaler, b, 1.0)
    with pytest.raises(OrderError, match="GS104"):
        scaler.step(second)
    assert b.tolist() == [0.0, 0.0]


def test_an_optimizer_first_seen_with_new_gradients_is_not_reported():
    scaler, first, second, b = _two(SGD)
    scaler.step(first)
    scaler.update()
    second.zero_grad()
    backward(scaler, b, 1.0)
    scaler.step(second)
    assert b.tolist() == [-1.0, -1.0]


def _clip(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 2.0**20)


def _cleared_after_clip(scaler, optimizer):
    _clip(scaler, optimizer)
    optimizer.zero_grad()
    _clip(scaler, optimizer)


def _cleared_after_unscale(scaler, optimizer):
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    _clip(scaler, optimizer)


def _unscaled_after_clear(scaler, optimizer):
    _clip(scaler, optimizer)
    optimizer.zero_grad()
    scaler.unscale_(optimizer)


def _carried_and_cleared(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.update(32.0)
    scaler.unscale_(optimizer)
    optimizer.zero_grad()


@pytest.mark.parametrize("new_scale", [None, 64.0])
@pytest.mark.parametrize(
    "calls",
    [
        _carried_and_cleared,
        _cleared_after_clip,
        _cleared_after_unscale,
        _unscaled_after_clear,
    ],
)
@optimizers
def test_gradients_after_cleared_ones_have_the_scale_of_their_loss(
    make, calls, new_scale
):
    scaler, _, second, b = _two(make)
    if new_scale is not None:
        scaler.update(new_scale)
    calls(scaler, second)
    backward(scaler, b, 0.5)
    scaler.step(second)
    assert b.tolist() == _alone(make, gradient=0.5)


@optimizers
def test_a_clip_of_cleared_gradients_does_not_clip_later_ones(make):
    scaler, _, second, b = _two(make)
    scaler.clip_grad_norm_(second, 0.01)
    second.zero_grad()
    scaler.clip_grad_norm_(second, 0.01)
    backward(scaler, b, 0.5)
    scaler.step(second)
    assert b.tolist() == _alone(make, gradient=0.5)


@pytest.mark.parametrize("value", [1.0, torch.inf])
def test_an_update_after_abandoned_gradients_moves_the_scale_as_torch_does(value):
    def scale_after(kind):
        scaler = kind("cpu", init_scale=4.0, growth_interval=1)
        param = parameter(2)
        optimizer = SGD([param], lr=1.0)
        backward(scaler, param, value)
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
        backward(scaler, param, 1.0)
        scaler.update()
        return scaler.get_scale()

    assert scale_after(GradScaler) == scale_after(torch.amp.GradScaler)


def test_gradients_made_after_unscale_are_unscaled_after_the_next_update():
    scaler, first, second, b = _two(SGD)
    second.zero_grad()
    scaler.unscale_(second)
    backward(scaler, b, 0.5)
    scaler.step(first)
    scaler.update()
    scaler.unscale_(second)
    assert b.grad.tolist() == [0.5, 0.5]
    scaler.step(second)
    assert b.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("unscale", [False, True])
def test_an_update_that_is_interrupted_at_its_end_can_be_made_again(
    monkeypatch, unscale
):
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    if unscale:
        scaler.unscale_(optimizer)
    else:
        scaler.step(optimizer)

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Iteration, "renew", interrupt)
        with pytest.raises(KeyboardInterrupt):
            scaler.update()
    if unscale:
        scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-1.0, -1.0]
