"""`enabled=False`: nothing but `optimizer.step()`."""

import pickle

import pytest
import torch

from gradscale.torch import GradScaler
from tests.torch.training import (
    INF,
    Custom,
    parameter,
    planted,
)

TORCH = torch.amp.GradScaler
SGD = torch.optim.SGD


@pytest.mark.parametrize(
    "outputs",
    [torch.ones(2), [torch.ones(2), 3], "text", None, 3.0, {"loss": 1}, object()],
    ids=lambda outputs: type(outputs).__name__,
)
def test_disabled_scale_returns_its_argument(outputs):
    assert GradScaler("cpu", enabled=False).scale(outputs) is outputs


def test_disabled_step_forwards_everything_and_returns_what_came_back():
    class Echo(Custom):
        def step(self, *args, **kwargs):
            return args, kwargs

    scaler = GradScaler("cpu", enabled=False)
    returned = scaler.step(Echo([parameter(2)]), 1, two=2, closure=3)
    assert returned == ((1,), {"two": 2, "closure": 3})


def test_disabled_step_runs_a_closure():
    param = parameter(2)
    optimizer = Custom([param])

    @torch.enable_grad()
    def closure():
        planted(param, 1.0).backward()
        return "loss"

    assert GradScaler("cpu", enabled=False).step(optimizer, closure) == "loss"
    assert param.tolist() == [-1.0, -1.0]


def test_disabled_step_takes_what_is_not_finite_as_torch_does():
    param = parameter(2)
    param.grad = torch.tensor([INF, 1.0])
    GradScaler("cpu", enabled=False).step(Custom([param]))
    assert param.tolist() == [-INF, -1.0]


def test_disabled_unscale_leaves_gradients():
    param = parameter(2)
    param.grad = torch.full((2,), 8.0)
    GradScaler("cpu", enabled=False).unscale_(Custom([param]))
    assert param.grad.tolist() == [8.0, 8.0]


@pytest.mark.parametrize(
    ("call", "returned"),
    [
        (lambda s: s.update(), None),
        (lambda s: s.update(8.0), None),
        (lambda s: s.update("nonsense"), None),
        (lambda s: s.load_state_dict({}), None),
        (lambda s: s.load_state_dict({"scale": 8.0}), None),
        (lambda s: s.state_dict(), {}),
        (lambda s: s.get_scale(), 1.0),
        (lambda s: s.is_enabled(), False),
        (lambda s: s._get_growth_tracker(), 0),
        (lambda s: s.set_growth_interval(5), None),
        (lambda s: s.set_growth_factor(5.0), None),
        (lambda s: s.set_backoff_factor(0.1), None),
    ],
)
def test_disabled_call_is_torchs_no_op(call, returned):
    assert call(TORCH("cpu", enabled=False)) == returned
    assert call(GradScaler("cpu", enabled=False)) == returned


def test_disabled_does_not_look_at_its_settings():
    scaler = GradScaler("cpu", init_scale=-1.0, growth_factor=0.0, enabled=False)
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize(
    "getter", ["get_growth_factor", "get_backoff_factor", "get_growth_interval"]
)
def test_disabled_getter_answers(getter):
    # Torch has an AttributeError here: the attributes were never made.
    assert getattr(GradScaler("cpu", enabled=False), getter)() > 0


def test_disabled_survives_pickling():
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False)))
    assert not scaler.is_enabled()
    assert scaler.scale("text") == "text"
