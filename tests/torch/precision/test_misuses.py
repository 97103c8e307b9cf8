"""Misuses that users report: float16 gradients, and calls out of order.

Each gives a coded error that names the cure, or the right result, in the first step at
the latest. The threads behind them are clusters F (23) and G (14) of the survey.
"""

import gc
import warnings

import pytest
import torch

from gradscale.errors import ConfigError, GradientError, GradscaleWarning, OrderError
from gradscale.torch import (
    GradScaler,
    ShardedGradScaler,
    fp32_trainable_,
    master_weights,
    optim,
)

F16 = torch.float16
CURES = (
    r"Use from gradscale\.torch\.optim import {kind}; or wrap this one: optimizer = "
    r"gradscale\.torch\.master_weights\(optimizer\); or, for LoRA, call "
    r"gradscale\.torch\.fp32_trainable_\(model\) and compute under torch\.autocast\."
)


class Lora(torch.nn.Module):
    """A frozen float16 layer with a trainable adapter, whose second factor is 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.nn.Linear(4, 4).requires_grad_(False)
        self.lora_a = torch.nn.Linear(4, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, 4, bias=False)
        torch.nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def trainable(model):
    return [param for param in model.parameters() if param.requires_grad]


def train(model, optimizer, scaler, steps=4, autocast=False):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.ones(2, 4)
        with torch.autocast("cpu", F16, enabled=autocast):
            out = model(x if autocast else x.half())
        loss = (out.float() - 1.0).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def no_optimizers_of_other_tests():
    gc.collect()


# --- F: float16 gradients -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_lora_in_float16_is_refused_with_names_and_cures(kind):
    model = Lora().half()
    optimizer = getattr(torch.optim, kind)(trainable(model), lr=1e-2)
    with pytest.raises(
        GradientError,
        match=r"^Attempting to unscale FP16 gradients\.\nThe gradients of "
        r"param_groups\[0\]\['params'\]\[0\], param_groups\[0\]\['params'\]\[1\] are "
        r"float16\. .*" + CURES.format(kind=kind) + r" \[GS105\]$",
    ):
        train(model, optimizer, GradScaler("cpu"))


def test_an_optimizer_without_a_namesake_is_pointed_to_the_others():
    model = Lora().half()
    optimizer = torch.optim.RMSprop(trainable(model))
    with pytest.raises(GradientError, match=r"Use an optimizer of gradscale\.torch\."):
        train(model, optimizer, GradScaler("cpu"))


def own(model):
    return optim.AdamW(trainable(model), lr=1e-2), False


def wrapped(model):
    return master_weights(torch.optim.AdamW(trainable(model), lr=1e-2)), False


def cast(model):
    assert fp32_trainable_(model) == ["lora_a.weight", "lora_b.weight"]
    assert model.base.weight.dtype is F16
    return torch.optim.AdamW(trainable(model), lr=1e-2), True


@pytest.mark.parametrize("cure", [own, wrapped, cast])
def test_each_cure_trains(cure):
    model = Lora().half()
    optimizer, autocast = cure(model)
    scaler = GradScaler("cpu", 2.0**10, model=model)
    losses = train(model, optimizer, scaler, steps=30, autocast=autocast)
    assert scaler.skipped_steps == 0
    assert losses[-1] < 0.5 * losses[0]


def test_fp32_trainable_keeps_an_optimizer_that_has_not_stepped():
    model = Lora().half()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
    fp32_trainable_(model)
    losses = train(model, optimizer, GradScaler("cpu", 2.0**10), 30, autocast=True)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("kind", "cures"),
    [("AdamW", CURES.format(kind="AdamW")), ("Adafactor", "Use an optimizer of .*")],
)
def test_float16_is_reported_when_the_scaler_is_made(kind, cures):
    model = Lora().half()
    optimizer = getattr(torch.optim, kind)(trainable(model))
    with pytest.warns(
        GradscaleWarning,
        match=rf"^2 trainable parameters are float16 in {kind}: lora_a\.weight, "
        r"lora_b\.weight, and it has no float32 masters\. .*" + cures + r" \[GS120\]$",
    ):
        GradScaler("cpu", model=model)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(ConfigError, match=r"lora_a\.weight.*GS120"),
    ):
        GradScaler("cpu", model=model, guard="raise")
    assert optimizer.state == {}


@pytest.mark.parametrize("cure", [own, wrapped, cast])
def test_nothing_is_reported_when_there_is_nothing_wrong(cure):
    model = Lora().half()
    optimizer, _ = cure(model)
    GradScaler("cpu", model=model, guard="raise")
    assert optimizer is not None


def test_nothing_is_reported_of_an_optimizer_inside_a_wrapped_one():
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner
            self.param_groups = inner.param_groups

    model = Lora().half()
    optimizer = master_weights(Outer(torch.optim.SGD(trainable(model), lr=0.1)))
    GradScaler("cpu", model=model, guard="raise")
    assert optimizer is not None


def test_nothing_is_reported_before_there_is_an_optimizer():
    GradScaler("cpu", model=Lora().half(), guard="raise")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_allow_fp16_with_an_eps_of_zero_is_refused_by_name(kind):
    model = Lora().half()
    before = [param.clone() for param in model.parameters()]
    scaler = GradScaler("cpu", model=model, allow_fp16=True)
    optimizer = kind(trainable(model))
    with pytest.raises(
        ConfigError,
        match=rf"^2 trainable parameters are float16 in {kind.__name__}: "
        r"lora_a\.weight, lora_b\.weight, with eps=1e-08, which is 0 in float16\. "
        r"Where a gradient is 0 .* the weights become NaN\. "
        + CURES.format(kind=kind.__name__)
        + r" To stay in float16, pass eps=1e-4\. \[GS125\]$",
    ):
        train(model, optimizer, scaler)
    for then, now in zip(before, model.parameters(), strict=True):
        assert torch.equal(then, now)
    # In every further step too.
    with pytest.raises(ConfigError, match="GS125"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("kind", "eps"), [("AdamW", 0), ("RMSprop", 0), ("Adafactor", (1e-30, 1e-3))]
)
def test_an_eps_of_zero_is_refused_in_any_form(kind, eps):
    model = Lora().half()
    optimizer = getattr(torch.optim, kind)(trainable(model), eps=eps)
    with pytest.raises(ConfigError, match=rf"in {kind}: .*, with eps=.*GS125"):
        train(model, optimizer, GradScaler("cpu", allow_fp16=True))


def test_adafactor_with_its_own_eps_trains_in_float16():
    model = Lora().half()
    optimizer = torch.optim.Adafactor(trainable(model), lr=1.0)
    losses = train(model, optimizer, GradScaler("cpu", 2.0**10, allow_fp16=True), 10)
    assert losses[-1] < losses[0]


def test_a_custom_optimizer_with_an_eps_of_zero_is_refused():
    class Mine(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1e-3, "eps": 1e-10})

        def step(self, closure=None):
            raise AssertionError("not reached")

    model = Lora().half()
    with pytest.raises(ConfigError, match=r"in Mine: .* with eps=1e-10"):
        train(model, Mine(trainable(model)), GradScaler("cpu", allow_fp16=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
        lambda params: torch.optim.SGD(params, lr=1e-2),
        lambda params: optim.AdamW(params, lr=1e-2),
        lambda params: master_weights(torch.optim.AdamW(params, lr=1e-2)),
    ],
)
def test_allow_fp16_stays_possible_where_it_can_work(make):
    model = Lora().half()
    optimizer = make(trainable(model))
    losses = train(model, optimizer, GradScaler("cpu", 2.0**10, allow_fp16=True), 10)
    assert losses[-1] < losses[0]


def test_a_sharded_scaler_accepts_what_torchs_accepts():
    model = Lora().half()
    optimizer = torch.optim.AdamW(trainable(model))
    scaler = ShardedGradScaler("cpu", 2.0**10)
    scaler.scale(model(torch.ones(2, 4).half()).float().sum()).backward()
    scaler.step(optimizer)


def test_a_fused_optimizer_of_torch_is_reported_in_its_first_step():
    model = Lora().half()
    scaler = GradScaler("cpu", 2.0**10, model=model)
    optimizer = torch.optim.AdamW(trainable(model), fused=True)
    with pytest.warns(GradscaleWarning, match=r"in AdamW: lora_a\.weight.*GS120"):
        train(model, optimizer, scaler, steps=1)
    train(model, optimizer, scaler, steps=2)


def test_with_guard_raise_it_is_an_error():
    model = Lora().half()
    scaler = GradScaler("cpu", 2.0**10, model=model, guard="raise")
    optimizer = torch.optim.AdamW(trainable(model), fused=True)
    with pytest.raises(ConfigError, match=r"master_weights\(optimizer\).*GS120"):
        train(model, optimizer, scaler)


def test_only_the_float16_parameters_are_named():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", allow_fp16=False)
    scaler.scale(model[1](model[0](torch.ones(1, 4)).half()).float().sum()).backward()
    with pytest.raises(
        GradientError,
        match=r"gradients of param_groups\[0\]\['params'\]\[2\], "
        r"param_groups\[0\]\['params'\]\[3\] are float16",
    ):
        scaler.step(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_frozen_float16_base_with_float32_adapters_trains(fused):
    model = Lora()
    model.base.half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = GradScaler("cpu", 2.0**10, model=model, guard="raise")
    losses = train(model, optimizer, scaler, 30, autocast=True)
    assert losses[-1] < 0.5 * losses[0]


def test_unscale_of_float16_for_a_clip_names_the_clip():
    model = Lora().half()
    optimizer = own(model)[0]
    scaler = GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4).half()).float().sum()).backward()
    with pytest.raises(
        GradientError,
        match=r"leave unscale_\(\) out, and clip by scaler\.clip_grad_norm_\(optimizer",
    ):
        scaler.unscale_(optimizer)


def test_unscale_of_float16_works_with_master_weights():
    model = Lora().half()
    optimizer = wrapped(model)[0]
    scaler = GradScaler("cpu", 2.0**10)
    scaler.scale(model(torch.ones(2, 4).half()).float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied


def test_one_of_two_optimizers_in_float16_is_refused_before_it_steps():
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).half()
    pair = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    scaler = GradScaler("cpu", 8.0)
    loss = second(first(torch.ones(1, 1)).half()).float().sum()
    scaler.scale(loss).backward()
    scaler.step(pair[0])
    before = second.weight.clone()
    with pytest.raises(GradientError, match="GS105"):
        scaler.step(pair[1])
    assert torch.equal(second.weight, before)


def test_bfloat16_parameters_are_stepped():
    model = Lora().to(torch.bfloat16)
    optimizer = torch.optim.SGD(trainable(model), lr=0.1)
    scaler = GradScaler("cpu", 2.0**10, model=model, guard="raise")
    out = model(torch.ones(2, 4, dtype=torch.bfloat16))
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied


# --- G: calls out of order ------------------------------------------------------------


def plain_sgd(param):
    return torch.optim.SGD([param], lr=0.5)


def fused_sgd(param):
    return torch.optim.SGD([param], lr=0.5, fused=True)


def own_sgd(param):
    return optim.SGD([param], lr=0.5)


def wrapped_sgd(param):
    return master_weights(torch.optim.SGD([param], lr=0.5))


kinds = pytest.mark.parametrize("make", [plain_sgd, fused_sgd, own_sgd, wrapped_sgd])


def begun(make, scale=8.0):
    dtype = F16 if make is wrapped_sgd else torch.float32
    param = torch.nn.Parameter(torch.ones(1, dtype=dtype))
    optimizer, scaler = make(param), GradScaler("cpu", scale)
    scaler.scale(param.float().sum()).backward()
    return scaler, optimizer, param


@kinds
def test_an_optimizer_without_gradients_is_reported_and_does_nothing(make):
    scaler, optimizer, param = begun(make)
    other = begun(make)[1]
    other.zero_grad()
    scaler.step(optimizer)
    with pytest.warns(
        GradscaleWarning,
        match=r"No parameter of \w+ has a gradient.*Check requires_grad.*GS103",
    ):
        scaler.step(other)
    scaler.update()
    assert param.item() == 0.5


@kinds
@pytest.mark.parametrize("call", ["step", "unscale_", "update"])
def test_a_call_before_the_first_scale_names_scale(make, call):
    _, optimizer, _ = begun(make)
    scaler = GradScaler("cpu")
    with pytest.raises(
        OrderError,
        match=rf"^Attempted {call} but _scale is None\.[\s\S]*Call "
        r"scaler\.scale\(loss\)\.backward\(\) first\. \[GS102\]",
    ):
        scaler.update() if call == "update" else getattr(scaler, call)(optimizer)


@kinds
def test_a_call_after_loading_a_state_names_scale(make):
    saved, optimizer, _ = begun(make)
    scaler = GradScaler("cpu")
    scaler.load_state_dict(saved.state_dict())
    with pytest.raises(OrderError, match=r"Call scaler\.scale\(loss\)\.backward\(\)"):
        scaler.step(optimizer)


@kinds
def test_a_second_unscale_is_refused(make):
    scaler, optimizer, _ = begun(make)
    scaler.unscale_(optimizer)
    with pytest.raises(
        OrderError,
        match=r"has already been called[\s\S]*Call update\(\) between steps, or remove",
    ):
        scaler.unscale_(optimizer)


@kinds
def test_unscale_after_the_step_is_refused(make):
    scaler, optimizer, _ = begun(make)
    scaler.step(optimizer)
    with pytest.raises(
        OrderError, match=r"called after step\(\)[\s\S]*Call unscale_\(\) before step"
    ):
        scaler.unscale_(optimizer)


@kinds
def test_a_second_step_is_refused(make):
    scaler, optimizer, _ = begun(make)
    scaler.step(optimizer)
    with pytest.raises(OrderError, match=r"Call update\(\) after each step\. \[GS102"):
        scaler.step(optimizer)


@kinds
def test_a_clip_after_the_step_is_refused(make):
    scaler, optimizer, _ = begun(make)
    scaler.step(optimizer)
    with pytest.raises(OrderError, match=r"Call clip_grad_norm_\(\) before step\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)


@kinds
def test_an_update_without_a_step_is_refused(make):
    scaler, optimizer, _ = begun(make)
    optimizer.step()
    with pytest.raises(
        OrderError,
        match=r"If you called optimizer\.step\(\) yourself.*call "
        r"scaler\.step\(optimizer\) instead",
    ):
        scaler.update()


@kinds
@pytest.mark.parametrize("clear", ["optimizer", "reset"])
def test_an_iteration_abandoned_after_unscale_leaves_nothing_behind(make, clear):
    scaler, optimizer, param = begun(make)
    scaler.unscale_(optimizer)
    # The loop skips this batch: no step, no update.
    if clear == "reset":
        scaler.reset()
    optimizer.zero_grad()
    scaler.scale(param.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.item() == 0.5


@kinds
def test_optimizers_that_take_turns_step_alone(make):
    scaler, first, param = begun(make)
    _, second, other = begun(make)
    second.zero_grad()
    for optimizer, mine in ((first, param), (second, other), (first, param)):
        optimizer.zero_grad()
        scaler.scale(mine.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [param.item(), other.item()] == [0.0, 0.5]


@kinds
def test_an_update_between_two_steps_keeps_the_scale_of_the_backward(make):
    scaler, first, param = begun(make)
    scaler = GradScaler("cpu", 8.0, growth_interval=1)
    _, second, other = begun(make)
    first.zero_grad()
    second.zero_grad()
    scaler.scale(param.float().sum() + other.float().sum()).backward()
    scaler.step(first)
    scaler.update()
    scaler.step(second)
    scaler.update()
    assert [param.item(), other.item()] == [0.5, 0.5]
