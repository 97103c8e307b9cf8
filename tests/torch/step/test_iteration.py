"""What is open between two updates, and what an update in between does to it."""

import pytest
import torch

from gradscale.torch import GradScaler
from gradscale.torch.grads import stats
from tests.torch.training import OPTIMIZERS, backward, parameter, planted

SGD = torch.optim.SGD
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def _alone(make, *, clip=None):
    """Return what one step at a scale of 4 leaves of a parameter."""
    scaler, param = GradScaler("cpu", init_scale=4.0), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, 1.0)
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
