"""What the scaler says and refuses."""

import warnings

import pytest
import torch

from gradscale import (
    ConfigError,
    DynamicScale,
    GradscaleWarning,
    NoScale,
    ScaleCollapsed,
    StaticScale,
    Verdict,
)
from gradscale.torch import GradScaler
from gradscale.torch.device_state.layout import ROW
from gradscale.torch.messages import Watchman
from tests.torch.training import (
    INF,
    NAN,
    OPTIMIZERS,
    backward,
    iterate,
    parameter,
    planted,
)

SGD = torch.optim.SGD
FLOOR = 2.0**-24


def _until_it_raises(scaler, optimizer, param, grads):
    """Return how many updates went well, and the error that ended them."""
    for count, grad in enumerate(grads):
        try:
            iterate(scaler, optimizer, param, grad)
        except ScaleCollapsed as error:
            return count, error
    return len(grads), None


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("guard", ["report", "raise"])
def test_a_collapse_is_raised_two_steps_after_the_third_at_the_floor(make, guard):
    scaler = GradScaler("cpu", init_scale=FLOOR, guard=guard)
    param = parameter(2, value=1.0)
    optimizer = make([param], lr=1.0)
    count, error = _until_it_raises(scaler, optimizer, param, [INF] * 9)
    assert count == 4
    assert error.code == "GS202"
    assert param.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == FLOOR


def test_a_collapse_says_what_where_and_what_to_do():
    model = torch.nn.Linear(1, 1)
    scaler = GradScaler("cpu", init_scale=FLOOR, model=model)
    optimizer = SGD(model.parameters(), lr=1.0)
    _, error = _until_it_raises(scaler, optimizer, model.bias, [INF] * 9)
    said = str(error)
    assert "floor of 5.96046e-08" in said
    assert "3 steps in a row; the loss was finite." in said
    assert "Not finite: bias." in said
    assert "check the batch and the loss" in said
    assert said.endswith("[GS202]")
    assert isinstance(error, FloatingPointError)


def test_a_collapse_says_that_the_loss_itself_was_not_finite():
    scaler, param = GradScaler("cpu", init_scale=FLOOR), parameter(2)
    optimizer = SGD([param], lr=1.0)

    def run():
        for _ in range(9):
            optimizer.zero_grad()
            scaler.scale(planted(param, NAN) + NAN).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(ScaleCollapsed, match="the loss was itself not finite"):
        run()


def test_two_bad_steps_at_the_floor_are_forgiven():
    scaler, param = GradScaler("cpu", init_scale=FLOOR), parameter(2)
    grads = [INF, INF, 1.0] * 4
    assert _until_it_raises(scaler, SGD([param], lr=1.0), param, grads) == (12, None)


def test_who_catches_a_collapse_can_go_on():
    scaler, param = GradScaler("cpu", init_scale=FLOOR), parameter(2)
    optimizer = SGD([param], lr=1.0)
    _until_it_raises(scaler, optimizer, param, [INF] * 9)
    assert _until_it_raises(scaler, optimizer, param, [1.0] * 6) == (6, None)
    assert param.tolist() == [-6.0, -6.0]


def test_who_goes_on_from_a_checkpoint_is_not_stopped_by_what_was_before_it():
    scaler, param = GradScaler("cpu", init_scale=FLOOR), parameter(2)
    optimizer = SGD([param], lr=1.0)
    good = scaler.state_dict() | {"scale": 8.0}
    _until_it_raises(scaler, optimizer, param, [INF] * 4)
    scaler.load_state_dict(good)
    assert _until_it_raises(scaler, optimizer, param, [1.0] * 6) == (6, None)


def test_a_collapse_that_goes_on_is_raised_again():
    scaler, param = GradScaler("cpu", init_scale=FLOOR), parameter(2)
    optimizer = SGD([param], lr=1.0)
    _until_it_raises(scaler, optimizer, param, [INF] * 9)
    assert _until_it_raises(scaler, optimizer, param, [INF] * 9)[1] is not None


def test_the_floor_is_the_policys():
    policy = DynamicScale(init_scale=8.0, min_scale=2.0)
    scaler, param = GradScaler("cpu", policy=policy), parameter(2)
    _, error = _until_it_raises(scaler, SGD([param], lr=1.0), param, [INF] * 20)
    assert "floor of 2 " in str(error)
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize(("guard", "scale"), [("report", 4.0), ("raise", 8.0)])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_guard_raise_holds_the_scale_while_the_loss_is_not_finite(
    guard, scale, bad, make
):
    scaler, param = GradScaler("cpu", init_scale=8.0, guard=guard), parameter(2)
    optimizer = make([param], lr=1.0)
    scaler.scale(planted(param, bad) + bad).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == scale
    assert param.tolist() == [0.0, 0.0]
    assert scaler.last.verdict is Verdict.FORWARD_NONFINITE


def test_guard_raise_holds_the_tracker_too():
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, guard="raise")
    param = parameter(2)
    optimizer = SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, 1.0)
    optimizer.zero_grad()
    scaler.scale(planted(param, NAN) + NAN).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._get_growth_tracker() == 1


def test_guard_raise_backs_off_where_only_the_gradients_overflow():
    scaler, param = GradScaler("cpu", init_scale=8.0, guard="raise"), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, INF)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("policy", [StaticScale(scale=8.0), NoScale()], ids=repr)
def test_a_skip_at_a_fixed_scale_is_said_once(policy):
    scaler, param = GradScaler("cpu", policy=policy), parameter(2)
    optimizer = SGD([param], lr=1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(8):
            iterate(scaler, optimizer, param, INF)
    assert [w.message.code for w in said] == ["GS205"]
    assert said[0].filename.endswith("training.py")
    assert f"fixed scale {policy.init_state().scale:g}" in str(said[0].message)
    assert "use DynamicScale" in str(said[0].message)
    assert scaler.skipped_steps == 8


def test_a_fixed_scale_stays_and_never_collapses():
    scaler, param = GradScaler("cpu", policy=StaticScale(scale=8.0)), parameter(2)
    optimizer = SGD([param], lr=1.0)
    with pytest.warns(GradscaleWarning):
        assert _until_it_raises(scaler, optimizer, param, [INF] * 9) == (9, None)
    assert scaler.get_scale() == 8.0
    assert param.tolist() == [0.0, 0.0]


def test_nothing_is_said_where_all_is_well():
    scaler, param = GradScaler("cpu", policy=StaticScale(scale=8.0)), parameter(2)
    optimizer = SGD([param], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            iterate(scaler, optimizer, param, 1.0)


def test_the_setting_of_a_fixed_scale_cannot_be_moved():
    scaler = GradScaler("cpu", policy=StaticScale(scale=8.0))
    with pytest.raises(ConfigError, match=r"growth_factor.*StaticScale.*DynamicScale"):
        scaler.set_growth_factor(3.0)


def _idle(scaler, optimizer, times=1):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(times):
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
    return said


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_missing_gradients_are_said_once_with_a_code_at_the_callers_line(make):
    optimizer = make([parameter(2)], lr=1.0)
    said = _idle(GradScaler("cpu"), optimizer, times=3)
    assert [w.message.code for w in said] == ["GS103"]
    assert said[0].filename == __file__
    assert f"No parameter of {type(optimizer).__name__} has a gradient" in str(
        said[0].message
    )
    assert "Check requires_grad" in str(said[0].message)


def test_missing_gradients_are_said_for_each_optimizer():
    scaler = GradScaler("cpu")
    optimizers = [SGD([parameter(2)], lr=1.0) for _ in range(2)]
    assert [len(_idle(scaler, optimizer)) for optimizer in optimizers] == [1, 1]


def test_missing_gradients_leave_scale_and_tracker():
    scaler, param = GradScaler("cpu", growth_interval=2), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, 1.0)
    before = (scaler.get_scale(), scaler._get_growth_tracker())
    _idle(scaler, SGD([parameter(2)], lr=1.0), times=3)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == before


@pytest.mark.parametrize(
    "new_scale",
    [8, 8.0, torch.tensor(8.0), torch.tensor([8.0]), torch.tensor([[8]])],
    ids=repr,
)
@pytest.mark.parametrize("stepped", [False, True])
def test_update_takes_a_new_scale(new_scale, stepped):
    scaler, param = GradScaler("cpu", growth_interval=5), parameter(2)
    optimizer = SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, 1.0)
    if stepped:
        backward(scaler, param, 1.0)
        scaler.step(optimizer)
    scaler.update(new_scale)
    assert scaler.get_scale() == 8.0
    # As in torch, the tracker stays.
    assert scaler._get_growth_tracker() == 1


def test_a_tensor_given_as_scale_is_copied():
    scaler, given = GradScaler("cpu"), torch.tensor(8.0)
    scaler.scale(torch.zeros(()))
    scaler.update(given)
    given.fill_(2.0)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    "new_scale",
    [0.0, -8.0, INF, NAN, 2.0**-25, 2.0**127, "8", True, torch.tensor(0.0)],
    ids=repr,
)
def test_a_new_scale_outside_the_bounds_is_refused_by_value(new_scale):
    scaler, param = GradScaler("cpu"), parameter(2)
    backward(scaler, param, 1.0)
    scaler.step(SGD([param], lr=1.0))
    with pytest.raises(
        ConfigError, match=r"update\(.*\) asks for a scale outside"
    ) as e:
        scaler.update(new_scale)
    assert "DynamicScale(min_scale=..., max_scale=...)" in str(e.value)
    assert scaler.get_scale() == 2.0**16
    scaler.update()
    assert scaler.last.applied


def test_a_tensor_that_was_refused_on_the_device_is_said_once():
    row = [float(name in ("refused", "stepped", "read")) for name in ROW]
    watchman, policy = Watchman(), DynamicScale()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            watchman.act(row, policy, lambda: None)
    assert [w.message.code for w in said] == ["GS109"]
    assert "outside [5.96046e-08, 8.50706e+37]" in str(said[0].message)


@pytest.mark.parametrize("init_scale", [2.0**-30, 2.0**127, 3e38])
def test_an_initial_scale_beyond_the_default_bounds_is_honoured(init_scale):
    scaler, param = GradScaler("cpu", init_scale=init_scale), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, 0.0)
    assert scaler.last.scale == torch.tensor(init_scale).item()
