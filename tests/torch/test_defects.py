"""What `torch.amp.GradScaler` gets wrong, and this one right.

A scenario takes the scaler's class and fails where the class does. Each is run twice:
torch's class must fail, and for the reason that is given, and ours must pass. Numbers
are those of the table of defects in PyTorch 2.13. Longer than other files because the
table is.
"""

import math
import warnings
from collections import namedtuple
from contextlib import suppress
from functools import partial

import pytest
import torch

from gradscale import GradscaleWarning, ScaleCollapsed
from gradscale.torch import GradScaler
from tests.torch.training import (
    FUSED,
    INF,
    Custom,
    CustomFused,
    backward,
    iterate,
    parameter,
    planted,
    sparse,
)

SGD = torch.optim.SGD
LOOP, KERNEL = partial(SGD, foreach=False), partial(SGD, fused=True)
MAKES = {"loop": {"make": LOOP}, "fused": {"make": KERNEL}, "custom": {"make": Custom}}
KERNELS = {
    name: {"make": make} for name, make in FUSED.items() if make is not CustomFused
}
SCENARIOS = []


def torch_fails(name, error, words, **variants):
    """Enter a scenario, once for each variant, and the way in which torch fails it."""

    def enter(scenario):
        for variant, settings in (variants or {"": {}}).items():
            case = partial(scenario, **settings)
            label = f"{name}-{variant}" if variant else name
            SCENARIOS.append(pytest.param(case, error, words, id=label))
        return scenario

    return enter


@torch_fails("D1", AssertionError, "the weights are not finite", **MAKES)
def weights_survive_a_scale_that_collapses(kind, make):
    scaler, param = kind("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    # 166 halvings take 2**16 to 0 where there is no floor.
    for grad in [INF] * 170 + [1.0]:
        with suppress(ScaleCollapsed):
            iterate(scaler, optimizer, param, grad)
    assert torch.isfinite(param).all(), "the weights are not finite"


@torch_fails("D1-scale", AssertionError, "the scale is 0")
def scale_stays_above_zero(kind):
    scaler, param = kind("cpu"), parameter(2)
    for _ in range(170):
        with suppress(ScaleCollapsed):
            iterate(scaler, SGD([param], lr=1.0), param, INF)
    assert scaler.get_scale() > 0.0, "the scale is 0"


@torch_fails("D2", AssertionError, "overflowed into the weights", **MAKES)
def an_unscale_that_overflows_is_a_skip(kind, make):
    scaler, param = kind("cpu", init_scale=2.0**-10), parameter(2)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, 1.0)
    param.grad.fill_(3e38)
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(param).all(), "the unscale overflowed into the weights"


@torch_fails("D3", AssertionError, "taken although inf was found", **KERNELS)
def an_inf_on_two_devices_is_a_skip(kind, make):
    scaler, param = kind("cpu"), parameter(2, value=1.0)
    optimizer = make([param], lr=1.0)
    backward(scaler, param, INF)
    scaler.unscale_(optimizer)
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    # A second device, as far as the scaler can see.
    flags[torch.device("meta")] = flags[torch.device("cpu")].clone()
    scaler.step(optimizer)
    assert param.tolist() == [1.0, 1.0], "the step was taken although inf was found"


@torch_fails(
    "D4",
    AssertionError,
    "the momentum buffer was garbage",
    plain={},
    dampening={"dampening": 0.25},
    nesterov={"nesterov": True},
    maximize={"maximize": True},
)
def fused_momentum_survives_a_skipped_first_step(kind, **settings):
    scaler, param = kind("cpu", init_scale=4.0), parameter(2)
    optimizer = SGD([param], lr=1.0, momentum=0.5, fused=True, **settings)
    torch.use_deterministic_algorithms(True)
    # On: fresh allocations hold NaN, not what happens to lie there.
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        for grad in (INF, 1.0, 1.0):
            iterate(scaler, optimizer, param, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = parameter(2)
    sure = SGD([expected], lr=1.0, momentum=0.5, **settings)
    for _ in range(2):
        expected.grad = torch.ones(2)
        sure.step()
    assert param.tolist() == expected.tolist(), "the momentum buffer was garbage"


@torch_fails(
    "D10",
    AssertionError,
    "the scale did not grow",
    setter={"lower": lambda scaler: scaler.set_growth_interval(3)},
    checkpoint={
        "lower": lambda scaler: scaler.load_state_dict(
            scaler.state_dict() | {"growth_interval": 3}
        )
    },
)
def growth_goes_on_after_the_interval_is_lowered(kind, lower):
    scaler, param = kind("cpu", init_scale=4.0, growth_interval=10), parameter(2)
    optimizer = SGD([param], lr=1.0)
    for _ in range(6):
        iterate(scaler, optimizer, param, 1.0)
    lower(scaler)
    iterate(scaler, optimizer, param, 1.0)
    assert scaler.get_scale() == 8.0, "the scale did not grow"


@torch_fails("D11", AssertionError, "moved by scaled gradients")
def a_positional_closure_never_runs_on_scaled_gradients(kind):
    scaler, param = kind("cpu", init_scale=1024.0), parameter(2)
    optimizer = SGD([param], lr=0.125)

    def closure():
        optimizer.zero_grad()
        loss = scaler.scale(planted(param, 1.0))
        loss.backward()
        return loss

    closure()
    with suppress(RuntimeError):
        scaler.step(optimizer, closure)
    assert abs(param[0].item()) <= 0.125, "the weights moved by scaled gradients"


@torch_fails("D12-update", AssertionError, "unscaled with the new scale")
def update_between_two_steps_keeps_the_scale_of_the_backward(kind):
    scaler = kind("cpu", init_scale=4.0, growth_interval=1)
    a, b = parameter(2), parameter(2, value=1.0)
    first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
    scaler.scale(planted(a, 1.0) + planted(b, 1.0)).backward()
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    scaler.update()
    assert b.tolist() == [0.0, 0.0], "the second was unscaled with the new scale"


@torch_fails("D12-accumulate", AssertionError, "nothing was said")
def accumulation_after_unscale_is_reported(kind):
    scaler, param = kind("cpu", init_scale=8.0), parameter(2)
    optimizer = SGD([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.unscale_(optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        backward(scaler, param, 1.0)
    assert param.grad.tolist() == [9.0, 9.0]
    assert [w.category for w in said] == [GradscaleWarning], "nothing was said"


@torch_fails("D13", AssertionError, "a skip looks like a step", **MAKES)
def a_skip_can_be_told_from_a_step(kind, make):
    scaler, param = kind("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    told = []
    for grad in (1.0, INF):
        optimizer.zero_grad()
        backward(scaler, param, grad)
        returned = scaler.step(optimizer)
        scaler.update()
        # All that public code looks at, and what it ought to look at.
        found = bool(scaler._found_inf_per_device(optimizer))
        told.append((returned, found, getattr(scaler, "last", None)))
    taken, skipped = [(*seen[:2], getattr(seen[2], "applied", None)) for seen in told]
    assert taken != skipped, "a skip looks like a step"


@torch_fails(
    "D14",
    UserWarning,
    r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`",
    loop={"make": LOOP},
    custom={"make": Custom},
)
def a_skipped_first_step_does_not_upset_the_scheduler(kind, make):
    scaler, param = kind("cpu"), parameter(2)
    optimizer = make([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    iterate(scaler, optimizer, param, INF)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


@torch_fails("D14-fused", AttributeError, "last")
def the_schedule_can_wait_for_a_fused_step(kind):
    scaler, param = kind("cpu"), parameter(2)
    optimizer = torch.optim.AdamW([param], lr=1.0, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    iterate(scaler, optimizer, param, INF)
    if scaler.last.applied:
        scheduler.step()
    assert scheduler.get_last_lr() == [1.0]


@torch_fails("D15", AssertionError, "recorded for this optimizer", loop={"make": LOOP})
@torch_fails("D15", AssertionError, "recorded prior to update", fused={"make": KERNEL})
def an_iteration_without_gradients_is_a_no_op(kind, make):
    scaler, param = kind("cpu"), parameter(2, value=1.0)
    optimizer = make([param], lr=1.0)
    scaler.scale(torch.zeros(()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradscaleWarning)
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 2.0**16


@torch_fails("int", AttributeError, "'int' object has no attribute")
def a_whole_number_is_a_new_scale(kind):
    scaler, param = kind("cpu"), parameter(2)
    backward(scaler, param, 1.0)
    scaler.step(SGD([param], lr=1.0))
    scaler.update(8)
    assert scaler.get_scale() == 8.0


@torch_fails("shape-one", RuntimeError, "broadcast shape")
def one_element_of_shape_one_is_a_new_scale(kind):
    scaler, param = kind("cpu"), parameter(2)
    backward(scaler, param, 1.0)
    scaler.step(SGD([param], lr=1.0))
    scaler.update(torch.tensor([8.0]))
    assert scaler.get_scale() == 8.0


@torch_fails(
    "bad-state",
    AssertionError,
    "part of it was loaded",
    missing={"_growth_tracker": None},
    factor={"growth_factor": 0.5},
    nan={"scale": math.nan},
    zero={"scale": 0.0},
    tracker={"_growth_tracker": 2**40},
    interval={"growth_interval": "often"},
)
def a_bad_state_changes_nothing(kind, **changes):
    scaler = kind("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    before = scaler.state_dict()
    bad = before | {"scale": 8.0} | changes
    with suppress(KeyError, ValueError, RuntimeError):
        scaler.load_state_dict({k: v for k, v in bad.items() if v is not None})
    assert repr(scaler.state_dict()) == repr(before), "part of it was loaded"


@torch_fails("attributes", AssertionError, "the optimizer still has them")
def a_failing_step_leaves_no_attributes_behind(kind):
    scaler, param = kind("cpu"), parameter(2)
    optimizer = torch.optim.Adam([param], fused=True)

    def fail(*_):
        raise ZeroDivisionError

    optimizer.register_step_pre_hook(fail)
    backward(scaler, param, 1.0)
    with suppress(ZeroDivisionError):
        scaler.step(optimizer)
    left = [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]
    assert left == [], "the optimizer still has them"


@torch_fails("complex", NotImplementedError, "ComplexFloat")
def complex_gradients_are_unscaled(kind):
    scaler, param = kind("cpu", init_scale=4.0), parameter(2, dtype=torch.complex64)
    backward(scaler, param, torch.tensor([1 + 2j, 3j]))
    scaler.step(SGD([param], lr=1.0))
    assert param.tolist() == [-1 - 2j, -3j]


@torch_fails("sparse", AssertionError, "overflowed into the weights")
def a_sum_of_sparse_duplicates_is_checked(kind):
    scaler, param = kind("cpu", init_scale=1.0), parameter(4)
    scaler.scale(torch.zeros(()))
    # Each is finite; their sum is not.
    param.grad = sparse([1, 1], [3e38, 3e38], 4)
    scaler.step(SGD([param], lr=1.0))
    assert torch.isfinite(param).all(), "the sum overflowed into the weights"


@torch_fails("expanded", RuntimeError, "more than one element")
def an_expanded_gradient_is_unscaled(kind):
    scaler, param = kind("cpu", init_scale=4.0), parameter(2, 3)
    scaler.scale(torch.zeros(()))
    param.grad = torch.full((2, 1), 4.0).expand(2, 3)
    scaler.step(SGD([param], lr=1.0))
    assert param.tolist() == [[-1.0] * 3] * 2


@torch_fails("shared", AssertionError, "unscaled twice", **MAKES)
def a_shared_gradient_is_unscaled_once(kind, make):
    scaler, a, b = kind("cpu", init_scale=4.0), parameter(2), parameter(2)
    backward(scaler, a, 1.0)
    b.grad = a.grad
    scaler.step(make([a, b], lr=1.0))
    assert (a.tolist(), b.tolist()) == ([-1.0] * 2, [-1.0] * 2), "unscaled twice"


@torch_fails("two-optimizers", AssertionError, "unscaled twice", **MAKES)
def a_parameter_in_two_optimizers_is_unscaled_once(kind, make):
    scaler, param = kind("cpu", init_scale=4.0), parameter(2)
    first, second = make([param], lr=1.0), make([param], lr=1.0)
    backward(scaler, param, 1.0)
    scaler.step(first)
    scaler.step(second)
    assert param.tolist() == [-2.0, -2.0], "unscaled twice"


@torch_fails("half-loss", AssertionError, "65536 is not a float16")
def a_half_loss_of_one_element_does_not_overflow(kind):
    loss = torch.ones(1, dtype=torch.float16)
    assert kind("cpu").scale(loss).item() == 65536.0, "65536 is not a float16"


@torch_fails("namedtuple", TypeError, "missing 1 required")
def a_named_tuple_stays_one(kind):
    pair = namedtuple("pair", "a b")
    scaled = kind("cpu", init_scale=4.0).scale(pair(torch.ones(()), torch.zeros(())))
    assert isinstance(scaled, pair)
    assert (scaled.a.item(), scaled.b.item()) == (4.0, 0.0)


@torch_fails("unknown-device", pytest.fail.Exception, "DID NOT RAISE")
def an_unknown_device_is_an_error(kind):
    with pytest.raises(ValueError, match="nonsense"):
        kind("nonsense")


@torch_fails("torch-device", AssertionError, "new_scale should be")
def a_device_can_be_given_as_torch_device(kind):
    scaler = kind(torch.device("cpu"))
    scaler.scale(torch.zeros(()))
    scaler.update(torch.tensor(8.0))


@torch_fails(
    "setting",
    pytest.fail.Exception,
    "DID NOT RAISE",
    zero={"init_scale": 0.0},
    negative={"init_scale": -1.0},
    nan={"init_scale": math.nan},
    interval={"growth_interval": 0},
    backoff_zero={"backoff_factor": 0.0},
    backoff_negative={"backoff_factor": -0.5},
)
def an_unusable_setting_is_an_error(kind, **settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        kind("cpu", **settings)


@pytest.mark.parametrize(("scenario", "error", "words"), SCENARIOS)
def test_torch_fails(scenario, error, words):
    with pytest.raises(error, match=words):
        scenario(torch.amp.GradScaler)


@pytest.mark.parametrize(("scenario", "error", "words"), SCENARIOS)
def test_gradscale_passes(scenario, error, words):
    scenario(GradScaler)
