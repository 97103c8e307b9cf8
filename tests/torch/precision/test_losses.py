"""Several losses, each with a scale of its own."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradscale import ConfigError, DynamicScale, GradientError, StateError, StaticScale
from gradscale.torch import GradScaler, master_weights
from tests.torch.training import INF, NAN, OPTIMIZERS, parameter, planted

SGD = torch.optim.SGD
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def run(scaler, losses, optimizers):
    """Run one iteration of (loss, id) pairs."""
    for loss, id in losses:
        with scaler.loss(loss, id=id) as scaled:
            scaled.backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


@optimizers
def test_the_step_uses_the_sum_of_the_unscaled_gradients(make):
    scaler, param = GradScaler("cpu"), parameter(2)
    reference = parameter(2)
    optimizer, plain = make([param], lr=1.0), make([reference], lr=1.0)
    run(scaler, [(planted(param, 0.75), 1), (planted(param, -0.25), 2)], [optimizer])
    reference.grad = torch.full((2,), 0.5)
    unscaler = GradScaler("cpu", init_scale=1.0)
    unscaler.scale(torch.zeros(()))
    unscaler.step(plain)
    assert torch.equal(param, reference)


exact = st.integers(-(2**11), 2**11).map(lambda n: n * 2.0**-8)
scales = st.integers(-10, 20).map(lambda n: 2.0**n)


@given(st.lists(st.tuples(exact, scales), min_size=1, max_size=4))
def test_gradients_of_any_scales_add_up_exactly(terms):
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = SGD([param], lr=1.0)
    for id, (grad, scale) in enumerate(terms, start=1):
        # As after some moves of this scale.
        scaler._loss_scales.scale(id, scaler.policy, param.device).fill_(scale)
        with scaler.loss(planted(param, grad), id=id) as scaled:
            scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [-sum(grad for grad, _ in terms)] * 3


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_loss_that_overflows_lowers_its_own_scale_alone(bad):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(2)
    run(
        scaler,
        [(planted(param, 1.0), "a"), (planted(param, bad), "b")],
        [SGD([param], lr=1.0)],
    )
    assert (scaler.loss_scale("a"), scaler.loss_scale("b")) == (8.0, 4.0)
    assert scaler.get_scale() == 8.0
    assert not scaler.last.applied
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [0, 1])
def test_only_the_optimizers_that_a_bad_loss_touches_are_skipped(bad):
    scaler, params = GradScaler("cpu"), [parameter(1), parameter(1)]
    steps = [SGD([param], lr=1.0) for param in params]
    grads = [INF if place == bad else 1.0 for place in range(2)]
    losses = [(planted(params[place], grads[place]), place) for place in range(2)]
    run(scaler, losses, steps)
    assert params[bad].item() == 0.0
    assert params[1 - bad].item() == -1.0
    assert scaler.last[steps[1 - bad]].applied
    assert not scaler.last[steps[bad]].applied


def test_a_scale_grows_by_the_finite_steps_of_its_own_loss():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    param = parameter(1)
    optimizer = SGD([param], lr=0.0)
    for number in range(4):
        losses = [(planted(param, 1.0), 1)]
        if number % 2:
            losses.append((planted(param, 1.0), 2))
        optimizer.zero_grad()
        run(scaler, losses, [optimizer])
    assert (scaler.loss_scale(1), scaler.loss_scale(2)) == (32.0, 16.0)
    # No loss was multiplied by it.
    assert scaler.get_scale() == 8.0


def test_the_main_loss_moves_the_scalers_scale():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    param = parameter(1)
    run(scaler, [(planted(param, 1.0), 0)], [SGD([param], lr=1.0)])
    assert scaler.get_scale() == scaler.loss_scale() == 16.0
    run(scaler, [(planted(param, INF), 0)], [SGD([param], lr=1.0)])
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("main", "other", "scales"),
    [(1.0, INF, (8.0, 4.0)), (INF, 1.0, (4.0, 8.0)), (1.0, 1.0, (8.0, 8.0))],
)
def test_a_loss_by_scale_beside_one_with_an_id(main, other, scales):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    optimizer = SGD([param], lr=1.0)
    scaler.scale(planted(param, main)).backward()
    with scaler.loss(planted(param, other), id=1) as scaled:
        scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler.loss_scale(1)) == scales
    finite = main == other == 1.0
    assert param.item() == (-2.0 if finite else 0.0)


def test_gradients_that_wait_over_an_update_join_the_sum():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    params = [parameter(1), parameter(1)]
    first, second = (SGD([param], lr=1.0) for param in params)
    scaler.scale(planted(params[0], 1.0) + planted(params[1], 1.0)).backward()
    scaler.step(first)
    scaler.update()
    run(scaler, [(planted(params[1], 2.0), 1)], [second])
    assert params[1].item() == -3.0


def test_all_scales_are_saved_and_resumed():
    def train(scaler, steps, param, optimizer):
        for step in steps:
            optimizer.zero_grad()
            grads = 1.0, INF if step == 2 else 0.5
            losses = [
                (planted(param, g), id) for g, id in zip(grads, "ab", strict=True)
            ]
            run(scaler, losses, [optimizer])

    policy = DynamicScale(init_scale=8.0, growth_interval=3, tolerance=0.25)
    one, there = GradScaler("cpu", policy=policy), parameter(2)
    alone = SGD([there], lr=1.0)
    train(one, range(9), there, alone)
    half, param = GradScaler("cpu", policy=policy), parameter(2)
    optimizer = SGD([param], lr=1.0)
    train(half, range(4), param, optimizer)
    saved = copy.deepcopy(half.state_dict())
    rest = GradScaler("cpu", policy=policy)
    rest.load_state_dict(saved)
    assert rest.loss_scale("b") == half.loss_scale("b")
    train(rest, range(4, 9), param, optimizer)
    assert rest.state_dict() == one.state_dict()
    assert torch.equal(param, there)


def test_a_copy_of_the_scaler_has_the_scales():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    run(scaler, [(planted(param, INF), 1)], [SGD([param], lr=1.0)])
    assert copy.deepcopy(scaler).loss_scale(1) == 4.0


def test_torch_loads_the_checkpoint_of_several_losses():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    run(scaler, [(planted(param, 1.0), 1)], [SGD([param], lr=1.0)])
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict()["scale"] == 8.0


@pytest.mark.parametrize(
    "losses",
    [
        7,
        [[1, 8.0, 0]],
        [[1, 0.0, 0, 0]],
        [[1, INF, 0, 0]],
        [[1, 8.0, -1, 0]],
        [[True, 8.0, 0, 0]],
        [[1, 8.0, 0, 0], [1, 8.0, 0, 0]],
    ],
)
def test_impossible_losses_of_a_checkpoint_change_nothing(losses):
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    run(scaler, [(planted(param, 1.0), 1)], [SGD([param], lr=1.0)])
    before = scaler.state_dict()
    broken = copy.deepcopy(before)
    broken["gradscale"]["losses"] = losses
    with pytest.raises(StateError, match="losses"):
        scaler.load_state_dict(broken)
    assert scaler.state_dict() == before


def test_an_error_in_the_block_leaves_the_gradients_as_they_were():
    scaler, param = GradScaler("cpu"), parameter(1)
    with scaler.loss(planted(param, 1.0), id=1) as scaled:
        scaled.backward()
    before = param.grad.clone()

    def fail():
        with scaler.loss(planted(param, 1.0), id=2) as scaled:
            scaled.backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(param.grad, before)


def test_gradients_that_cannot_be_scaled_are_refused_and_lose_nothing():
    scaler, params = GradScaler("cpu"), [parameter(2), parameter(2)]
    for param in params:
        param.grad = torch.ones(2)

    def fail():
        loss = planted(params[0], 1.0) + planted(params[1], 1.0)
        with scaler.loss(loss, id=1) as scaled:
            scaled.backward()
            memory = torch.ones(3)
            params[0].grad, params[1].grad = memory[:2], memory[1:]

    with pytest.raises(GradientError, match=r"overlap|share"):
        fail()
    assert [param.grad.tolist() for param in params] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("id", [None, 1.5, (1,), True])
def test_an_id_that_no_checkpoint_can_hold_is_refused(id):
    scaler = GradScaler("cpu")
    with (
        pytest.raises(ConfigError, match="whole number or a string"),
        scaler.loss(torch.ones((), requires_grad=True), id=id),
    ):
        pass


def test_the_scale_of_an_unknown_loss_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"loss_scale\('x'\).*Known ids: \[0\]"):
        GradScaler("cpu").loss_scale("x")


def test_a_disabled_scaler_passes_the_loss_on():
    scaler = GradScaler("cpu", enabled=False)
    loss = torch.ones((), requires_grad=True)
    with scaler.loss(loss, id=3) as scaled:
        assert scaled is loss
    assert scaler.loss_scale(3) == 1.0


def test_a_static_scale_is_the_scale_of_every_loss():
    scaler, param = GradScaler("cpu", policy=StaticScale(scale=8.0)), parameter(1)
    run(scaler, [(planted(param, 1.0), 1)], [SGD([param], lr=1.0)])
    assert (scaler.loss_scale(1), param.item()) == (8.0, -1.0)


def test_reset_forgets_the_losses_of_an_abandoned_iteration():
    scaler, param = GradScaler("cpu", init_scale=8.0), parameter(1)
    optimizer = SGD([param], lr=1.0)
    with scaler.loss(planted(param, INF), id=1) as scaled:
        scaled.backward()
    scaler.reset()
    optimizer.zero_grad()
    run(scaler, [(planted(param, 1.0), 2)], [optimizer])
    assert scaler.loss_scale(1) == 8.0


def test_losses_of_float16_weights_reach_their_masters():
    param = parameter(2, value=1.0, dtype=torch.float16)
    optimizer = master_weights(SGD([param], lr=0.25))
    scaler = GradScaler("cpu", init_scale=8.0)
    run(scaler, [(planted(param, 1.0), 1), (planted(param, 0.5), 2)], [optimizer])
    assert scaler.last.applied
    assert param.tolist() == [0.625, 0.625]
