"""Errors and warnings of the scaler."""

import copy
import linecache
import pickle
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
from gradscale.torch import GradScaler, optim
from gradscale.torch.device_state.async_copy import LAG, PERIOD
from gradscale.torch.messages import has_steps
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
def test_a_collapse_is_raised_when_the_row_of_the_third_step_at_the_floor_is_read(
    make, guard
):
    scaler = GradScaler("cpu", init_scale=FLOOR, guard=guard)
    param = parameter(2, value=1.0)
    optimizer = make([param], lr=1.0)
    count, error = _until_it_raises(scaler, optimizer, param, [INF] * 9)
    assert count == PERIOD + LAG - 1
    assert error.code == "GS202"
    assert param.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == FLOOR


def test_the_error_of_a_collapse_names_scale_culprits_and_remedy():
    model = torch.nn.Linear(1, 1)
    scaler = GradScaler("cpu", init_scale=FLOOR, model=model)
    optimizer = SGD(model.parameters(), lr=1.0)
    _, error = _until_it_raises(scaler, optimizer, model.bias, [INF] * 9)
    text = str(error)
    assert "floor of 5.96046e-08" in text
    assert "3 steps in a row; the loss was finite." in text
    assert "Not finite: bias." in text
    assert "the weights are those of the last applied step" in text
    assert "Check the batch, the loss and the weights" in text
    assert text.endswith("[GS202]")
    assert isinstance(error, FloatingPointError)


def test_the_error_of_a_collapse_names_a_loss_that_is_not_finite():
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


def test_training_continues_after_a_collapse_is_caught():
    scaler, param = GradScaler("cpu", init_scale=FLOOR), parameter(2)
    optimizer = SGD([param], lr=1.0)
    _until_it_raises(scaler, optimizer, param, [INF] * 9)
    assert _until_it_raises(scaler, optimizer, param, [1.0] * 6) == (6, None)
    assert param.tolist() == [-6.0, -6.0]


def test_rows_before_a_loaded_checkpoint_do_not_raise():
    scaler, param = GradScaler("cpu", init_scale=FLOOR), parameter(2)
    optimizer = SGD([param], lr=1.0)
    good = scaler.state_dict() | {"scale": 8.0}
    _until_it_raises(scaler, optimizer, param, [INF] * 5)
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
def test_a_skip_at_a_fixed_scale_warns_once(policy):
    scaler, param = GradScaler("cpu", policy=policy), parameter(2)
    optimizer = SGD([param], lr=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            iterate(scaler, optimizer, param, INF)
    assert [w.message.code for w in caught] == ["GS205"]
    assert caught[0].filename.endswith("training.py")
    assert f"fixed scale {policy.init_state().scale:g}" in str(caught[0].message)
    assert "use DynamicScale" in str(caught[0].message)
    assert scaler.skipped_steps == 8


def test_a_fixed_scale_stays_and_never_collapses():
    scaler, param = GradScaler("cpu", policy=StaticScale(scale=8.0)), parameter(2)
    optimizer = SGD([param], lr=1.0)
    with pytest.warns(GradscaleWarning):
        assert _until_it_raises(scaler, optimizer, param, [INF] * 9) == (9, None)
    assert scaler.get_scale() == 8.0
    assert param.tolist() == [0.0, 0.0]


def test_healthy_steps_warn_of_nothing():
    scaler, param = GradScaler("cpu", policy=StaticScale(scale=8.0)), parameter(2)
    optimizer = SGD([param], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            iterate(scaler, optimizer, param, 1.0)


def test_the_setting_of_a_fixed_scale_cannot_be_moved():
    scaler = GradScaler("cpu", policy=StaticScale(scale=8.0))
    with pytest.raises(ConfigError, match=r"growth_factor.*StaticScale.*DynamicScale"):
        scaler.set_growth_factor(3.0)


def _idle(scaler, optimizer, times=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
    return caught


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_missing_gradients_warn_once_at_the_callers_line(make):
    optimizer = make([parameter(2)], lr=1.0)
    caught = _idle(GradScaler("cpu"), optimizer, times=3)
    assert [w.message.code for w in caught] == ["GS103"]
    assert caught[0].filename == __file__
    assert f"No parameter of {type(optimizer).__name__} has a gradient" in str(
        caught[0].message
    )
    assert "Check requires_grad" in str(caught[0].message)


def test_missing_gradients_warn_for_each_optimizer():
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
        ConfigError, match=r"update\(.*\) requests a scale outside"
    ) as e:
        scaler.update(new_scale)
    assert "DynamicScale(min_scale=..., max_scale=...)" in str(e.value)
    assert scaler.get_scale() == 2.0**16
    scaler.update()
    assert scaler.last.applied


def test_a_tensor_that_was_refused_on_the_device_warns_once():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    iterate(scaler, optimizer, param, 1.0)
    # As an update on a device leaves it: a tensor on the CPU is refused at once.
    scaler._state.fields.refused.fill_(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            iterate(scaler, optimizer, param, 1.0)
    assert [w.message.code for w in caught] == ["GS109"]
    assert caught[0].filename.endswith("training.py")
    assert "outside [5.96046e-08, 8.50706e+37]" in str(caught[0].message)


@pytest.mark.parametrize("init_scale", [2.0**-30, 2.0**127, 3e38])
def test_an_initial_scale_beyond_the_default_bounds_is_honoured(init_scale):
    scaler, param = GradScaler("cpu", init_scale=init_scale), parameter(2)
    iterate(scaler, SGD([param], lr=1.0), param, 0.0)
    assert scaler.last.scale == torch.tensor(init_scale).item()


# --- an optimizer that resumes while the scaler starts anew ---------------------------


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.ones(3))


def with_gradient(weight):
    weight.grad = torch.ones_like(weight)
    return weight


def stepped_once(kind, weight, **options):
    """Return an optimizer that has taken a step."""
    optimizer = kind([with_gradient(weight)], lr=0.01, **options)
    optimizer.step()
    return optimizer


def take_steps(scaler, *optimizers, steps=1):
    for _ in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                weight = with_gradient(group["params"][0])
                scaler.scale(weight.sum())
            scaler.step(optimizer)
        scaler.update()


def codes(scaler, *optimizers, steps=1):
    """Return the codes of the warnings in some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        take_steps(scaler, *optimizers, steps=steps)
    return [w.message.code for w in caught if isinstance(w.message, GradscaleWarning)]


STATEFUL = pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"capturable": False, "foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (optim.AdamW, {}),
        (optim.SGD, {"momentum": 0.9}),
    ],
    ids=repr,
)


@STATEFUL
@pytest.mark.parametrize("guard", ["report", "raise"])
def test_a_resumed_optimizer_under_a_new_scaler_is_reported_once(
    kind, options, guard, weight
):
    optimizer = stepped_once(kind, weight, **options)
    assert codes(GradScaler("cpu", guard=guard), optimizer, steps=4) == ["GS301"]


def test_the_warning_names_optimizer_scale_and_remedy(weight):
    optimizer = stepped_once(torch.optim.Adam, weight)
    with pytest.warns(GradscaleWarning) as caught:
        take_steps(GradScaler("cpu", init_scale=1024.0), optimizer)
    text = str(caught[0].message)
    assert "Adam has taken steps before" in text
    assert "scale=1024 " in text
    assert "scaler.load_state_dict()" in text
    assert "were not scaled, ignore this" in text


def test_the_warning_points_at_the_line_that_stepped(weight):
    optimizer = stepped_once(torch.optim.Adam, weight)
    with pytest.warns(GradscaleWarning) as caught:
        take_steps(GradScaler("cpu"), optimizer)
    line = linecache.getline(caught[0].filename, caught[0].lineno)
    assert line.strip() == "scaler.step(optimizer)"


def test_a_state_that_was_loaded_is_reported(weight):
    saved = stepped_once(torch.optim.AdamW, weight).state_dict()
    optimizer = torch.optim.AdamW([weight])
    optimizer.load_state_dict(saved)
    assert codes(GradScaler("cpu"), optimizer) == ["GS301"]


def test_several_resumed_optimizers_are_reported_once(weight):
    optimizers = [
        stepped_once(torch.optim.AdamW, torch.nn.Parameter(torch.ones(2)))
        for _ in range(3)
    ]
    assert codes(GradScaler("cpu"), *optimizers) == ["GS301"]


def test_a_resumed_optimizer_beside_a_new_one_is_reported(weight):
    new = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    assert codes(GradScaler("cpu"), new, stepped_once(torch.optim.AdamW, weight)) == [
        "GS301"
    ]


@STATEFUL
def test_a_new_optimizer_is_not_reported(kind, options, weight):
    optimizer = kind([weight], lr=0.01, **options)
    assert codes(GradScaler("cpu"), optimizer, steps=4) == []


@STATEFUL
def test_a_scaler_with_its_state_is_not_reported(kind, options, weight):
    optimizer = kind([weight], lr=0.01, **options)
    first = GradScaler("cpu")
    take_steps(first, optimizer)
    second = GradScaler("cpu")
    second.load_state_dict(first.state_dict())
    assert codes(second, optimizer) == []


def test_the_state_of_a_scaler_that_never_stepped_counts_too(weight):
    scaler = GradScaler("cpu")
    scaler.load_state_dict(GradScaler("cpu").state_dict())
    assert codes(scaler, stepped_once(torch.optim.AdamW, weight)) == []


def test_an_optimizer_that_joins_later_is_not_reported(weight):
    scaler = GradScaler("cpu")
    take_steps(scaler, torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    assert codes(scaler, stepped_once(torch.optim.AdamW, weight)) == []


def test_an_iteration_that_was_abandoned_after_its_step_is_not_reported(weight):
    scaler, optimizer = GradScaler("cpu"), torch.optim.AdamW([with_gradient(weight)])
    scaler.scale(weight.sum())
    scaler.step(optimizer)
    scaler.reset()
    assert codes(scaler, optimizer) == []


@pytest.mark.parametrize(
    "policy", [StaticScale(scale=64.0), DynamicScale()], ids=["static", "disabled"]
)
def test_a_scale_that_cannot_be_lost_is_not_reported(policy, weight):
    enabled = isinstance(policy, StaticScale)
    scaler = GradScaler("cpu", policy=policy, enabled=enabled)
    assert codes(scaler, stepped_once(torch.optim.AdamW, weight)) == []


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_scaler_that_has_stepped_is_not_reported(copied, weight):
    scaler, optimizer = GradScaler("cpu"), torch.optim.AdamW([weight])
    take_steps(scaler, optimizer)
    assert codes(copied(scaler), optimizer) == []


def test_a_copy_of_a_scaler_that_never_stepped_is_reported(weight):
    scaler = copy.deepcopy(GradScaler("cpu"))
    assert codes(scaler, stepped_once(torch.optim.AdamW, weight)) == ["GS301"]


class Unreadable(torch.Tensor):
    """A count that takes an operator to read, as one on a device does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("the count was read")


def state_of(weight, **fields):
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = fields
    return optimizer


def test_a_count_that_is_no_plain_tensor_is_not_read(weight):
    step = torch.zeros(()).as_subclass(Unreadable)
    optimizer = type("Other", (), {"state": {weight: {"step": step}}})()
    assert has_steps(optimizer)


def test_a_count_on_a_device_is_not_read(weight):
    # A tensor on the meta device has no value to be read.
    assert has_steps(state_of(weight, step=torch.zeros((), device="meta")))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"step": 0}, False),
        ({"step": 2}, True),
        ({"step": torch.tensor(0.0)}, False),
        ({"step": torch.tensor(5.0)}, True),
        ({"step": torch.zeros((), dtype=torch.float64)}, False),
        ({"step": torch.ones((), dtype=torch.float64)}, True),
        ({"step": torch.tensor(7)}, True),
        ({"step": torch.ones(2)}, True),
        ({"step": None}, True),
        ({"momentum_buffer": torch.ones(3)}, True),
    ],
    ids=repr,
)
def test_a_state_shows_whether_there_were_steps(fields, expected, weight):
    assert has_steps(state_of(weight, **fields)) is expected


def test_an_entry_without_a_state_is_passed_over(weight):
    optimizer = state_of(weight)
    optimizer.state[torch.nn.Parameter(torch.ones(1))] = {"step": 3}
    assert has_steps(optimizer)


@pytest.mark.parametrize("state", [None, [], {"step": 3}], ids=repr)
def test_an_optimizer_without_a_state_of_its_parameters_has_no_steps(state):
    assert not has_steps(type("Other", (), {"state": state})())


def test_a_late_backward_is_reported_at_its_line_with_the_models_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    optimizer, scaler = SGD(model.parameters(), lr=1.0), GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.warns(
        GradscaleWarning, match=r"unscaled or clipped: 0\.weight\."
    ) as at:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    assert at[0].filename == __file__
    line = linecache.getline(__file__, at[0].lineno)
    assert line.strip().endswith(".sum()).backward()")


def test_an_update_after_a_step_of_the_optimizer_itself_names_the_mistake():
    scaler, param = GradScaler("cpu"), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    optimizer.step()
    with pytest.raises(AssertionError) as caught:
        scaler.update()
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "called optimizer.step() yourself" in text
    assert "only after the step of the last micro-batch" in text


def test_a_batch_is_diagnosed_at_the_initial_scale_before_the_first_step():
    model = torch.nn.Linear(2, 1).half()
    scaler = GradScaler("cpu", init_scale=2.0**14, model=model)
    x = torch.full((1, 2), 100.0).half()
    location = scaler.diagnose(lambda: model(x).sum())
    assert (location.found, location.scale) == (True, 2.0**14)
