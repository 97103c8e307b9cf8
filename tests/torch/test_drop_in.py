"""A drop-in for `torch.amp.GradScaler`: signatures, defaults, and the same run."""

import inspect

import pytest
import torch

import gradscale.torch.cpu.amp
import gradscale.torch.cuda.amp
from gradscale import ConfigError, StaticScale
from gradscale.torch import GradScaler
from tests.torch.training import (
    FUSED,
    INF,
    NAN,
    OPTIMIZERS,
    CustomFused,
    backward,
    iterate,
    parameter,
    planted,
)

TORCH = torch.amp.GradScaler
SGD = torch.optim.SGD


METHODS = [name for name, value in vars(TORCH).items() if inspect.isfunction(value)]


def _parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found]


def _split(function):
    """Return the parameters, those that are keyword-only apart."""
    own = _parameters(function)
    extra = [p for p in own if p[1] is inspect.Parameter.KEYWORD_ONLY]
    return [p for p in own if p not in extra], extra


def test_an_instance_is_an_instance_of_torchs_class():
    assert isinstance(GradScaler("cpu"), TORCH)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_what_torchs_takes(name):
    ours, _ = _split(getattr(GradScaler, name))
    assert ours == _parameters(getattr(TORCH, name))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_defined_here_and_not_inherited(name):
    # torch.compile(fullgraph=True) refuses what is inherited from torch.amp.
    assert name in vars(GradScaler)


def test_the_constructor_adds_keywords_only():
    _, extra = _split(GradScaler.__init__)
    names = {name for name, _, _ in extra}
    assert {"policy", "guard", "model", "process_group", "kernels"} <= names


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (gradscale.torch.cuda.amp.GradScaler, torch.cuda.amp.GradScaler),
        (gradscale.torch.cpu.amp.GradScaler, torch.cpu.amp.GradScaler),
    ],
    ids=["cuda", "cpu"],
)
def test_the_older_class_has_the_older_signature(ours, theirs):
    older = _parameters(theirs.__init__)
    assert _parameters(ours.__init__)[: len(older)] == older


@pytest.mark.parametrize(
    "getter",
    [
        "get_scale",
        "get_growth_factor",
        "get_backoff_factor",
        "get_growth_interval",
        "is_enabled",
        "_get_growth_tracker",
    ],
)
def test_a_default_is_torchs(getter):
    ours, theirs = (getattr(kind("cpu"), getter)() for kind in (GradScaler, TORCH))
    assert ours == theirs
    assert type(ours) is type(theirs)


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("set_growth_factor", 4.0),
        ("set_backoff_factor", 0.25),
        ("set_growth_interval", 7),
    ],
)
def test_a_setting_that_is_set_is_returned(setter, value):
    scaler = GradScaler("cpu")
    getattr(scaler, setter)(value)
    assert getattr(scaler, setter.replace("set_", "get_"))() == value


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("set_growth_factor", 1.0),
        ("set_backoff_factor", 1.0),
        ("set_backoff_factor", 0.0),
        ("set_growth_interval", 0),
    ],
)
def test_a_setting_that_cannot_work_is_refused_and_not_set(setter, value):
    scaler = GradScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(ConfigError):
        getattr(scaler, setter)(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_run_is_torchs_run_bit_for_bit(make, unscale):
    def run(kind):
        scaler, param = kind("cpu", init_scale=64.0, growth_interval=2), parameter(3)
        optimizer = make([param], lr=0.5)
        seen = []
        for grad in (0.75, INF, -0.1, 0.3, 0.7, NAN, 1e-3, 2.0, 3.0):
            optimizer.zero_grad()
            backward(scaler, param, [grad, 0.3, -0.7])
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            # Where a step was taken, .grad is left unscaled by both.
            grads = param.grad.tolist() if abs(grad) < INF else None
            seen.append((scaler.state_dict()["scale"], param.tolist(), grads))
        return seen

    assert run(GradScaler) == run(TORCH)


def test_accumulation_is_torchs():
    def run(kind):
        scaler, param = kind("cpu", init_scale=64.0), parameter(2)
        optimizer = SGD([param], lr=1.0)
        for _ in range(3):
            for _ in range(4):
                backward(scaler, param, 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return param.tolist()

    assert run(GradScaler) == run(TORCH)


def test_clipping_scaled_gradients_by_hand_is_torchs():
    def run(kind):
        scaler, param = kind("cpu", init_scale=64.0), parameter(2)
        optimizer = SGD([param], lr=1.0)
        backward(scaler, param, [3.0, 4.0])
        torch.nn.utils.clip_grad_norm_([param], 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        return param.tolist()

    assert run(GradScaler) == run(TORCH)


def test_each_optimizer_skips_on_its_own_gradients_and_all_share_the_scale():
    def run(kind):
        scaler, a, b = kind("cpu", init_scale=64.0), parameter(2), parameter(2)
        first, second = SGD([a], lr=1.0), SGD([b], lr=1.0)
        for grad in (1.0, INF):
            first.zero_grad()
            second.zero_grad()
            scaler.scale(planted(a, grad) + planted(b, 1.0)).backward()
            scaler.step(first)
            scaler.step(second)
            scaler.update()
        return a.tolist(), b.tolist(), scaler.get_scale()

    assert run(GradScaler) == run(TORCH) == ([-1.0] * 2, [-2.0] * 2, 32.0)


@pytest.mark.parametrize("unscale", [False, True])
def test_sparse_gradients_with_duplicates_keep_torchs_bits(unscale):
    weights = []
    for make in (torch.amp.GradScaler, GradScaler):
        torch.manual_seed(0)
        table = torch.nn.Embedding(3, 4, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        scaler = make("cpu", init_scale=3.0)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(table(torch.randint(3, (9,))).square().sum() / 7).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        weights.append(table.weight.tolist())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("factor", [4.0, 16.0, 100.0, 1000.0, 1e6, 2.0**40])
def test_scales_equal_torchs_for_any_growth_factor(factor):
    scales = []
    for make in (torch.amp.GradScaler, GradScaler):
        scaler, param = (
            make("cpu", growth_factor=factor, growth_interval=1),
            parameter(2),
        )
        optimizer = torch.optim.SGD([param], lr=0.0)
        scales.append([])
        for _ in range(60):
            iterate(scaler, optimizer, param, 0.0)
            scales[-1].append(scaler.get_scale())
    # Equal up to one ulp a move where the factor is no power of two.
    assert scales[1] == pytest.approx(scales[0], rel=60 * 2.0**-24)


def test_growth_stops_where_f32_ends():
    def run(kind):
        scaler, param = kind("cpu", init_scale=1e38, growth_interval=1), parameter(2)
        for _ in range(3):
            iterate(scaler, SGD([param], lr=1.0), param, 0.0)
        return scaler.get_scale()

    assert run(TORCH) < INF
    assert run(GradScaler) < INF


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_gradient_written_between_unscale_and_step_is_applied_as_in_torch(make):
    def run(kind):
        scaler, param = kind("cpu", init_scale=4.0), parameter(2)
        optimizer = make([param], lr=1.0)
        backward(scaler, param, 1.0)
        scaler.unscale_(optimizer)
        param.grad[1] = INF
        scaler.step(optimizer)
        scaler.update()
        return repr(param.tolist()), scaler.get_scale()

    assert run(GradScaler) == run(TORCH)
    assert make is CustomFused or "nan" in run(TORCH)[0] or "inf" in run(TORCH)[0]


def test_policy_and_settings_together_are_refused():
    with pytest.raises(ConfigError, match=r"policy=StaticScale.*leave the policy out"):
        GradScaler("cpu", init_scale=8.0, policy=StaticScale(scale=4.0))


@pytest.mark.parametrize(
    "option", [{"guard": "warn"}, {"kernels": "fast"}, {"policy": "dynamic"}], ids=repr
)
def test_an_unknown_choice_is_refused_by_name(option):
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        GradScaler("cpu", **option)
