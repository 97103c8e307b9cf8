"""A run that resumes without the scaler's state is told so, once."""

import copy
import linecache
import pickle
import warnings

import pytest
import torch

from gradscale import DynamicScale, GradscaleWarning, StaticScale
from gradscale.torch import GradScaler, optim
from gradscale.torch.resuming import has_steps


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.ones(3))


def with_gradient(weight):
    weight.grad = torch.ones_like(weight)
    return weight


def used(kind, weight, **options):
    """Return an optimizer with one step behind it."""
    optimizer = kind([with_gradient(weight)], lr=0.01, **options)
    optimizer.step()
    return optimizer


def train(scaler, *optimizers, steps=1):
    for _ in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                weight = with_gradient(group["params"][0])
                scaler.scale(weight.sum())
            scaler.step(optimizer)
        scaler.update()


def codes(scaler, *optimizers, steps=1):
    """Return the codes that are said in some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(scaler, *optimizers, steps=steps)
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


# --- what is said ---------------------------------------------------------------------


@STATEFUL
@pytest.mark.parametrize("guard", ["report", "raise"])
def test_a_resumed_optimizer_under_a_new_scaler_is_reported_once(
    kind, options, guard, weight
):
    optimizer = used(kind, weight, **options)
    assert codes(GradScaler("cpu", guard=guard), optimizer, steps=4) == ["GS301"]


def test_the_report_names_optimizer_and_scale_and_what_to_do(weight):
    optimizer = used(torch.optim.Adam, weight)
    with pytest.warns(GradscaleWarning) as caught:
        train(GradScaler("cpu", init_scale=1024.0), optimizer)
    text = str(caught[0].message)
    assert "Adam has steps behind it" in text
    assert "scale=1024 " in text
    assert "scaler.load_state_dict()" in text
    assert "were not scaled, all is well" in text


def test_the_report_points_at_the_line_that_stepped(weight):
    optimizer = used(torch.optim.Adam, weight)
    with pytest.warns(GradscaleWarning) as caught:
        train(GradScaler("cpu"), optimizer)
    line = linecache.getline(caught[0].filename, caught[0].lineno)
    assert line.strip() == "scaler.step(optimizer)"


def test_a_state_that_was_loaded_is_seen(weight):
    saved = used(torch.optim.AdamW, weight).state_dict()
    optimizer = torch.optim.AdamW([weight])
    optimizer.load_state_dict(saved)
    assert codes(GradScaler("cpu"), optimizer) == ["GS301"]


def test_several_resumed_optimizers_are_reported_once(weight):
    optimizers = [
        used(torch.optim.AdamW, torch.nn.Parameter(torch.ones(2))) for _ in range(3)
    ]
    assert codes(GradScaler("cpu"), *optimizers) == ["GS301"]


def test_a_resumed_optimizer_beside_a_new_one_is_reported(weight):
    new = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    assert codes(GradScaler("cpu"), new, used(torch.optim.AdamW, weight)) == ["GS301"]


# --- what is not ----------------------------------------------------------------------


@STATEFUL
def test_a_new_optimizer_is_not_reported(kind, options, weight):
    optimizer = kind([weight], lr=0.01, **options)
    assert codes(GradScaler("cpu"), optimizer, steps=4) == []


@STATEFUL
def test_a_scaler_with_its_state_is_not_reported(kind, options, weight):
    optimizer = kind([weight], lr=0.01, **options)
    first = GradScaler("cpu")
    train(first, optimizer)
    second = GradScaler("cpu")
    second.load_state_dict(first.state_dict())
    assert codes(second, optimizer) == []


def test_the_state_of_a_scaler_that_never_stepped_counts_too(weight):
    scaler = GradScaler("cpu")
    scaler.load_state_dict(GradScaler("cpu").state_dict())
    assert codes(scaler, used(torch.optim.AdamW, weight)) == []


def test_an_optimizer_that_joins_later_is_not_reported(weight):
    scaler = GradScaler("cpu")
    train(scaler, torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
    assert codes(scaler, used(torch.optim.AdamW, weight)) == []


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
    assert codes(scaler, used(torch.optim.AdamW, weight)) == []


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_scaler_that_has_stepped_is_not_reported(copied, weight):
    scaler, optimizer = GradScaler("cpu"), torch.optim.AdamW([weight])
    train(scaler, optimizer)
    assert codes(copied(scaler), optimizer) == []


def test_a_copy_of_a_scaler_that_never_stepped_is_reported(weight):
    scaler = copy.deepcopy(GradScaler("cpu"))
    assert codes(scaler, used(torch.optim.AdamW, weight)) == ["GS301"]


# --- how it is told -------------------------------------------------------------------


class Unreadable(torch.Tensor):
    """A count that cannot be had without an operator, as one on a device."""

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
def test_a_state_tells_whether_there_were_steps(fields, expected, weight):
    assert has_steps(state_of(weight, **fields)) is expected


def test_an_entry_without_a_state_is_passed_over(weight):
    optimizer = state_of(weight)
    optimizer.state[torch.nn.Parameter(torch.ones(1))] = {"step": 3}
    assert has_steps(optimizer)


@pytest.mark.parametrize("state", [None, [], {"step": 3}], ids=repr)
def test_an_optimizer_of_another_make_is_let_be(state):
    assert not has_steps(type("Other", (), {"state": state})())
