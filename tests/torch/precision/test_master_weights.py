"""f32 masters around any optimizer: what is stepped, skipped, clipped, kept, saved."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.testing._internal.two_tensor

from gradscale.errors import ConfigError, GradientError, OrderError, StateError
from gradscale.torch import GradScaler, master_params, master_weights, optim

HALF = torch.float16


class Custom(torch.optim.Optimizer):
    """Sign descent with a running mean, made by hand; each group counts its steps."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if len(state) == 0:
                    state["mean"] = torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.5)
                param -= group["lr"] * state["mean"].sign()


KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW-amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.75),
    "SGD-fused": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.75, fused=True
    ),
    "SGD-fused-dampened": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.75, dampening=0.5, fused=True
    ),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "custom": Custom,
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def halves(values=((1.0, -0.5), (0.25,)), dtype=HALF):
    return [torch.nn.Parameter(torch.tensor(v, dtype=dtype)) for v in values]


def give(params, value=0.5, scale=1.0):
    for place, param in enumerate(params):
        param.grad = torch.full_like(param, scale * value / (place + 1))


def scaled(params, scale=1024.0, value=0.5):
    """Return a scaler whose next step uses these gradients, scaled."""
    scaler = GradScaler("cpu", scale)
    scaler.scale(torch.zeros(()))
    give(params, value, scale)
    return scaler


def masters(optimizer):
    return [master.detach().clone() for master in optimizer.targets()]


# --- what a step does -----------------------------------------------------------------


@kinds
def test_masters_move_as_float32_parameters_do(make):
    wide, params = halves(dtype=torch.float32), halves()
    reference, optimizer = make(wide), master_weights(make(params))
    scaler = GradScaler("cpu", 1024.0)
    for step in range(4):
        value = 0.5**step
        give(wide, value)
        reference.step()
        scaler.scale(torch.zeros(()))
        give(params, value, 1024.0)
        scaler.step(optimizer)
        scaler.update()
    # Powers of two: every gradient is exact in float16 at this scale.
    for expected, master, param in zip(wide, optimizer.targets(), params, strict=True):
        assert torch.equal(expected, master)
        assert torch.equal(param, master.to(HALF))


@kinds
def test_a_skipped_step_leaves_masters_weights_and_state(make):
    params = halves()
    optimizer = master_weights(make(params))
    scaler = scaled(params)
    scaler.step(optimizer)
    scaler.update()
    before = masters(optimizer), [p.detach().clone() for p in params]
    saved = copy.deepcopy(optimizer.state_dict())
    scaler.scale(torch.zeros(()))
    give(params, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    for then, now in zip(before[0], optimizer.targets(), strict=True):
        assert torch.equal(then, now)
    for then, now in zip(before[1], params, strict=True):
        assert torch.equal(then, now)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], saved["state"], rtol=0, atol=0)


@kinds
def test_a_skipped_first_step_leaves_a_usable_state(make):
    params, others = halves(), halves()
    optimizer, untouched = master_weights(make(params)), master_weights(make(others))
    scaler = scaled(params, value=float("nan"))
    scaler.step(optimizer)
    scaler.update()
    for one, held in ((optimizer, params), (untouched, others)):
        give(held)
        one.step()
    for a, b in zip(optimizer.targets(), untouched.targets(), strict=True):
        assert torch.equal(a, b)


def test_the_gradients_of_the_model_are_not_changed():
    params = [*halves(), *halves([(2.0,)], torch.float32)]
    optimizer = master_weights(torch.optim.SGD(params, lr=0.5))
    scaler = scaled(params)
    before = [(p.grad, p.grad.clone()) for p in params]
    scaler.step(optimizer)
    for param, (grad, value) in zip(params, before, strict=True):
        assert param.grad is grad
        assert torch.equal(grad, value)
    # 0.5 / 3 in f32, scaled by a power of two.
    assert params[2].item() == (2.0 - 0.5 * torch.tensor(0.5 / 3)).item()


def test_small_updates_add_up():
    params = halves([(1.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=2.0**-14))
    for _ in range(16):
        give(params, 1.0)
        optimizer.step()
    assert params[0].item() == 1.0 - 2.0**-10


def test_gradients_too_small_for_float16_once_unscaled_are_applied():
    params = halves([(0.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=2.0**20))
    scaler = scaled(params, scale=2.0**16, value=2.0**-30)
    scaler.step(optimizer)
    assert params[0].item() == -(2.0**-10)


def test_parameters_of_all_dtypes_share_an_optimizer():
    dtypes = (HALF, torch.bfloat16, torch.float32, torch.float64)
    params = [halves([(1.0,)], dtype)[0] for dtype in dtypes]
    optimizer = master_weights(torch.optim.SGD(params, lr=0.25))
    scaler = scaled(params, value=1.0)
    scaler.step(optimizer)
    wanted = [torch.float32, torch.float32, torch.float32, torch.float64]
    assert [target.dtype for target in optimizer.targets()] == wanted
    assert [p.dtype for p in params] == list(dtypes)
    kept = [t is p for t, p in zip(optimizer.targets(), params, strict=True)]
    assert kept == [False, False, True, True]
    for place, param in enumerate(params):
        exact = 1.0 - 0.25 / (place + 1)
        assert param.item() == pytest.approx(exact, rel=2.0**-8)


def cut_by_norm(params):
    torch.nn.utils.clip_grad_norm_(params, 1.0)


def cut_by_value(params):
    torch.nn.utils.clip_grad_value_(params, 1.0)


def replaced(params):
    params[0].grad = params[0].grad / 2.0


def removed(params):
    params[0].grad = None


@pytest.mark.parametrize("change", [cut_by_norm, cut_by_value, replaced, removed])
def test_a_clip_of_the_models_gradients_after_unscale_is_refused(change):
    params = halves()
    optimizer = master_weights(torch.optim.SGD(params, lr=1.0))
    scaler = scaled(params)
    scaler.unscale_(optimizer)
    before = [param.clone() for param in params]
    change(params)
    # In a second call too.
    for _ in range(2):
        with pytest.raises(
            OrderError,
            match=r"a clip of model\.parameters\(\) would change nothing\. Clip by "
            r"scaler\.clip_grad_norm_\(optimizer, max_norm\), or .*GS102",
        ):
            scaler.step(optimizer)
    assert all(map(torch.equal, before, params))
    scaler.reset()
    optimizer.zero_grad()
    scaler.scale(params[1].float().sum()).backward()
    scaler.step(optimizer)
    assert params[1].item() == before[1].item() - 1.0


class Keeping(torch.optim.Optimizer):
    """Steps a list of its own, as wrappers of optimizers and some others do."""

    def __init__(self, params):
        super().__init__(params, {})
        self.kept = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.kept:
            param.sub_(param.grad)


def test_an_optimizer_with_a_list_of_its_own_is_refused():
    params = halves()
    optimizer = master_weights(Keeping(params))
    before = [param.clone() for param in params]
    scaler = scaled(params)
    with pytest.raises(
        ConfigError, match=r"^Keeping has written to the parameters.*restored.*GS101"
    ):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, params))


def test_masters_have_the_attributes_of_their_parameters():
    class Rated(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                param.sub_(param.grad, alpha=param.rate)

    params = halves()
    for param in params:
        param.rate = 0.5
    optimizer = master_weights(Rated(params, {}))
    give(params)
    optimizer.step()
    assert params[1].item() == 0.25 - 0.5 * 0.25


def test_frozen_parameters_have_no_master_until_they_are_trained():
    params = halves()
    params[1].requires_grad_(False)
    optimizer = master_weights(torch.optim.SGD(params, lr=0.5))
    assert optimizer.targets()[1] is params[1]
    give(params[:1])
    optimizer.step()
    assert params[1].item() == 0.25
    params[1].requires_grad_(True)
    give(params)
    optimizer.step()
    assert optimizer.targets()[1].dtype is torch.float32
    assert params[1].item() == 0.125


def test_several_groups_keep_their_settings_and_counts():
    first, second = halves()
    groups = [{"params": [first], "lr": 0.25}, {"params": [second], "lr": 0.5}]
    inner = Custom(groups)
    optimizer = master_weights(inner)
    give([first, second])
    optimizer.step()
    assert [first[0].item(), second.item()] == [0.75, -0.25]
    assert [group["count"] for group in optimizer.param_groups] == [1, 1]


def test_a_tied_weight_has_one_master():
    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second).half()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.5))
    assert len(optimizer.targets()) == 1
    model(torch.ones(1, 2, dtype=HALF)).sum().backward()
    optimizer.step()
    assert torch.equal(first.weight, optimizer.targets()[0].half())
    assert second.weight is first.weight


def test_zero_grad_clears_the_model_and_the_masters():
    params = halves()
    optimizer = master_weights(torch.optim.SGD(params, lr=0.5))
    scaled(params).unscale_(optimizer)
    assert all(target.grad is not None for target in optimizer.targets())
    optimizer.zero_grad()
    assert [p.grad for p in (*params, *optimizer.targets())] == [None] * 4


# --- clipping and unscale_ ------------------------------------------------------------


def applied(clip, make=lambda params: torch.optim.SGD(params, lr=1.0)):
    params = halves([(0.0, 0.0), (0.0,)])
    optimizer = master_weights(make(params))
    scaler = scaled(params, value=8.0)
    clip(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last.applied
    return torch.cat([target.detach() for target in optimizer.targets()])


def by_scaler(scaler, optimizer):
    scaler.clip_grad_norm_(optimizer, 1.0)


def by_scaler_after_unscale(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 1.0)


def by_torch(scaler, optimizer):
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(master_params(optimizer), 1.0)


def by_scaler_on_masters(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(master_params(optimizer), 1.0)


def by_scaler_on_params(scaler, optimizer):
    scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


@pytest.mark.parametrize(
    "clip",
    [
        by_scaler,
        by_scaler_after_unscale,
        by_torch,
        by_scaler_on_masters,
        by_scaler_on_params,
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_every_way_to_clip_gives_an_update_of_that_norm(clip, fused):
    moved = applied(clip, lambda p: torch.optim.SGD(p, lr=1.0, fused=fused))
    # 8, 8 and 4 to norm 1; torch adds 1e-6 to the norm.
    wanted = -torch.tensor([8.0, 8.0, 4.0]) / 12.0
    torch.testing.assert_close(moved, wanted, rtol=1e-6, atol=0)


def test_the_norm_is_that_of_the_unscaled_gradients():
    params = halves([(0.0, 0.0), (0.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=1.0))
    scaler = scaled(params, value=8.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 12.0


def test_unscale_without_a_clip_gives_the_same_update():
    plain = applied(lambda scaler, optimizer: None)
    assert torch.equal(plain, applied(lambda scaler, opt: scaler.unscale_(opt)))


def test_a_clip_of_masters_without_gradients_is_refused():
    params = halves()
    optimizer = master_weights(torch.optim.SGD(params, lr=1.0))
    scaler = scaled(params)
    with pytest.raises(OrderError, match=r"Call scaler\.unscale_\(optimizer\) first"):
        list(master_params(optimizer))
    scaler.step(optimizer)
    assert [m.dtype for m in master_params(optimizer)] == [torch.float32] * 2


def test_a_clip_of_an_own_optimizers_masters_is_refused():
    params = halves()
    optimizer = optim.AdamW(params)
    assert list(master_params(optimizer)) == params
    give(params)
    with pytest.raises(OrderError, match=r"scaler\.clip_grad_norm_\(optimizer"):
        list(master_params(optimizer))
    optimizer.step()
    optimizer.zero_grad()
    assert [m.dtype for m in master_params(optimizer)] == [torch.float32] * 2


def test_master_params_of_any_other_optimizer_are_its_parameters():
    params = halves()
    listed = list(master_params(torch.optim.SGD(params, lr=1.0)))
    assert all(a is b for a, b in zip(listed, params, strict=True))


def test_gradients_can_be_clipped_without_a_scaler():
    params = halves([(0.0,)], torch.bfloat16)
    optimizer = master_weights(torch.optim.SGD(params, lr=1.0))
    give(params, 8.0)
    optimizer.unscale_to_masters()
    torch.nn.utils.clip_grad_norm_(master_params(optimizer), 2.0)
    optimizer.step()
    assert params[0].item() == pytest.approx(-2.0, rel=1e-5)
    # Of the next backward: not those that were clipped.
    give(params, 4.0)
    optimizer.step()
    assert params[0].item() == pytest.approx(-6.0, rel=2.0**-8)


def test_a_backward_after_unscale_is_reported():
    weight = halves([(1.0,)])[0]
    optimizer = master_weights(torch.optim.SGD([weight], lr=1.0))
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(weight.float().sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.warns(UserWarning, match=r"already unscaled or clipped.*\[GS104\]"):
        scaler.scale(weight.float().sum()).backward()


def test_unscaled_gradients_that_are_cleared_are_unscaled_anew():
    params = halves([(0.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=1.0))
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(params[0].float().sum()).backward()
    scaler.unscale_(optimizer)
    params[0].grad = None
    scaler.scale(2.0 * params[0].float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert params[0].item() == -2.0


def test_a_bad_gradient_found_by_recheck_is_a_skip_with_the_models_name():
    model = torch.nn.Linear(1, 1, bias=False).half()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = GradScaler("cpu", 8.0, recheck=True, model=model)
    scaler.scale(model(torch.ones(1, 1, dtype=HALF)).float().sum()).backward()
    scaler.unscale_(optimizer)
    next(master_params(optimizer)).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last.applied
    assert scaler.last.culprits == ("weight",)


# --- growth, back-off and skips -------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_updates_equal_those_of_float32_over_growth_backoff_and_skips(own):
    wide, params = halves(dtype=torch.float32), halves()
    settings = {"lr": 2.0**-6, "momentum": 0.5}
    reference = torch.optim.SGD(wide, **settings)
    if own:
        optimizer = optim.SGD(params, **settings)
    else:
        optimizer = master_weights(torch.optim.SGD(params, **settings))
    scaler = GradScaler("cpu", 8.0, growth_interval=2)
    scales = set()
    for step in range(16):
        value = 2.0 ** (step % 5 - 4)
        bad = step % 6 == 5
        scale = scaler.get_scale()
        scales.add(scale)
        scaler.scale(torch.zeros(()))
        give(params, float("inf") if bad else value, scale)
        scaler.step(optimizer)
        scaler.update()
        if not bad:
            give(wide, value)
            reference.step()
        held = (optimizer.state[p]["master"] for p in params)
        for expected, master in zip(wide, held, strict=True):
            assert torch.equal(expected, master)
    assert len(scales) > 2


# --- writes to the model's weights ----------------------------------------------------


def own_sgd(params, **how):
    return optim.SGD(params, lr=2.0**-14, **how)


def wrapped_sgd(params, **how):
    return master_weights(torch.optim.SGD(params, lr=2.0**-14), **how)


both = pytest.mark.parametrize("make", [own_sgd, wrapped_sgd])


@both
def test_an_announced_write_is_kept_and_other_elements_keep_their_digits(make):
    params = halves([(1.0, 1.0)])
    optimizer = make(params)
    give(params, 1.0)
    optimizer.step()
    with torch.no_grad():
        params[0][0] = 2.0
    give(params, 0.0)
    optimizer.step()
    assert optimizer.state[params[0]]["master"].tolist() == [2.0, 1.0 - 2.0**-14]


@both
def test_a_write_through_data_is_kept_if_asked_for(make):
    params = halves([(1.0, 1.0)])
    optimizer = make(params, check_data=True)
    for _ in range(3):
        give(params, 0.0)
        optimizer.step()
        params[0].data[0] = 2.0
    give(params, 0.0)
    optimizer.step()
    assert params[0].tolist() == [2.0, 1.0]


@both
def test_a_write_through_data_is_reported_once(make):
    params = halves([(1.0, 1.0), (1.0,)])
    optimizer = make(params)
    give(params, 0.0)
    optimizer.step()
    params[1].data.zero_()
    expected = (
        r"After a step, param_groups\[0\]\['params'\]\[1\] was written to through "
        r"\.data\. .* overwrites it with the rounded float32 master\. Write to the "
        r"parameter itself under torch\.no_grad\(\), or pass check_data=True .*"
        r"Reported once\. \[GS124\]"
    )
    with pytest.warns(UserWarning, match=expected):
        optimizer.step()
    for _ in range(8):
        params[1].data.zero_()
        optimizer.step()


@both
@pytest.mark.parametrize("every", [2, 10, 64])
def test_a_write_through_data_in_every_few_steps_is_reported(make, every):
    params = halves([(1.0,)])
    optimizer = make(params)

    def train():
        for step in range(1, 1300):
            give(params, 0.0)
            optimizer.step()
            if step % every == 0:
                params[0].data.zero_()

    with pytest.warns(UserWarning, match="GS124"):
        train()


@both
def test_no_write_is_reported_where_there_was_none(make):
    params = halves([(1.0, float("nan")), (1.0,)])
    optimizer = make(params)
    for step in range(9):
        give(params, 0.5 * step)
        optimizer.step()
        with torch.no_grad():
            params[1].add_(0.25)


def test_weights_loaded_between_two_steps_are_kept():
    model = torch.nn.Linear(2, 1).half()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.5))
    give(model.parameters(), 0.0)
    optimizer.step()
    model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    optimizer.step()
    assert model.weight.tolist() == [[1.0, 1.0]]


# --- checkpoints, copies, schedulers --------------------------------------------------


def run(make, steps, saved_at=None, grow=False):
    """Train; with `saved_at`, stop there and go on from what was saved."""
    torch.manual_seed(0)
    data = torch.randn(steps, 4, 3)

    def build():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        model.half()
        optimizer = master_weights(make(model[0].parameters()))
        return model, optimizer, GradScaler("cpu", 2.0**18, growth_interval=3)

    model, optimizer, scaler = build()
    for step in range(steps):
        if grow and step == 2:
            optimizer.add_param_group({"params": list(model[1].parameters())})
        if step == saved_at:
            file = io.BytesIO()
            held = [part.state_dict() for part in (model, optimizer, scaler)]
            torch.save(held, file)
            file.seek(0)
            model, optimizer, scaler = build()
            if grow:
                optimizer.add_param_group({"params": list(model[1].parameters())})
            loaded = torch.load(file, weights_only=True)
            for part, state in zip((model, optimizer, scaler), loaded, strict=True):
                part.load_state_dict(state)
        optimizer.zero_grad()
        loss = model(data[step].half()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return [*optimizer.targets(), *model.parameters()], scaler.state_dict()


@kinds
@pytest.mark.parametrize("grow", [False, True])
def test_a_resumed_run_is_bit_identical(make, grow):
    whole, scale = run(make, 7, grow=grow)
    again, scale_again = run(make, 7, saved_at=4, grow=grow)
    assert scale == scale_again
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(a, b)


def test_a_state_dict_has_torchs_format_with_a_master_in_each_state():
    params = halves()
    optimizer = master_weights(torch.optim.AdamW(params))
    give(params)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"].keys() == {0, 1}
    assert saved["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
    own = optim.AdamW(halves())
    own.load_state_dict(saved)
    for held in own.state.values():
        assert held["exp_avg"].dtype is torch.float32
    torch.optim.AdamW(halves()).load_state_dict(saved)


def test_a_state_of_torchs_optimizer_loads_and_masters_come_from_the_parameters():
    params = halves()
    plain = torch.optim.AdamW(params)
    give(params)
    plain.step()
    optimizer = master_weights(torch.optim.AdamW(params))
    optimizer.load_state_dict(plain.state_dict())
    for param, target in zip(params, optimizer.targets(), strict=True):
        assert torch.equal(param.float(), target)
        assert optimizer.state[param]["exp_avg"].dtype is torch.float32


def test_an_optimizer_with_state_can_be_wrapped():
    params = halves()
    plain = torch.optim.SGD(params, lr=0.5, momentum=0.5)
    give(params)
    plain.step()
    optimizer = master_weights(plain)
    buffer = optimizer.state[params[0]]["momentum_buffer"]
    assert buffer.dtype is torch.float32
    assert buffer.tolist() == [0.5, 0.5]


def test_a_state_that_is_loaded_after_unscale_keeps_the_gradients():
    params = halves([(1.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=1.0))
    scaler = scaled(params, scale=8.0, value=0.25)
    scaler.unscale_(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    scaler.step(optimizer)
    assert params[0].item() == 0.75


def test_a_master_of_another_shape_is_refused_and_nothing_changes():
    params = halves()
    optimizer = master_weights(torch.optim.SGD(params, lr=0.5))
    saved = optimizer.state_dict()
    saved["state"][1] = {"master": torch.zeros(3)}
    before = masters(optimizer)
    with pytest.raises(StateError, match=r"shape \(3,\), the parameter has \(1,\)"):
        optimizer.load_state_dict(saved)
    for then, now in zip(before, optimizer.targets(), strict=True):
        assert torch.equal(then, now)


def test_state_dict_hooks_run():
    optimizer = master_weights(torch.optim.SGD(halves(), lr=0.5))
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("before"))
    optimizer.register_state_dict_post_hook(lambda opt, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda opt, d: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    saved = optimizer.state_dict()
    assert saved.pop("more") == 1
    optimizer.load_state_dict(saved)
    assert seen == ["before", "load", "loaded"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
def test_a_copy_goes_on_alike(copied):
    params = halves()
    optimizer = master_weights(torch.optim.AdamW(params, lr=1e-2), check_data=True)
    give(params)
    optimizer.step()
    again, other = copied((params, optimizer))
    assert other.check_data
    for held, one in ((params, optimizer), (again, other)):
        give(held)
        one.step()
    for a, b in zip(optimizer.targets(), other.targets(), strict=True):
        assert torch.equal(a, b)
        assert a is not b
    with pytest.raises(OrderError, match="was used directly"):
        other.inner.step()


@pytest.mark.parametrize("before", [False, True])
def test_a_scheduler_made_before_or_after_sets_the_rate(before):
    params = halves([(1.0,)])
    inner = torch.optim.SGD(params, lr=0.5)
    optimizer = inner if before else master_weights(inner)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer = master_weights(inner) if before else optimizer
    for _ in range(2):
        give(params, 1.0)
        optimizer.step()
        schedule.step()
    assert params[0].item() == 1.0 - 0.5 - 0.25


@pytest.mark.parametrize("before", [False, True])
def test_a_skipped_first_step_does_not_upset_the_scheduler(before):
    params = halves([(1.0,)])
    inner = torch.optim.SGD(params, lr=0.5)
    optimizer = inner if before else master_weights(inner)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer = master_weights(inner) if before else optimizer
    scaled(params, value=float("inf")).step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_step_hooks_of_both_run():
    params = halves()
    inner, seen = torch.optim.SGD(params, lr=0.5), []
    inner.register_step_post_hook(lambda *_: seen.append("inner"))
    optimizer = master_weights(inner)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    give(params)
    optimizer.step()
    assert seen == ["before", "inner", "after"]


# --- closures -------------------------------------------------------------------------


def test_a_closure_is_passed_on_without_a_scaler():
    params = halves([(4.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=0.25))

    def closure():
        optimizer.zero_grad()
        loss = params[0].float().square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 16.0
    assert params[0].item() == 2.0


def test_an_optimizer_with_a_closure_sees_the_gradients_from_before():
    class Twice(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure):
            (param,) = self.param_groups[0]["params"]
            first = param.grad.clone()
            closure()
            param.sub_(first + param.grad)

    params = halves([(1.0,)])
    optimizer = master_weights(Twice(params, {}))
    give(params, 0.25)
    optimizer.step(lambda: give(params, 0.5))
    assert params[0].item() == 0.25


def test_lbfgs_steps_masters():
    params = halves([(3.0, -2.0)])
    inner = torch.optim.LBFGS(params, line_search_fn="strong_wolfe")
    optimizer = master_weights(inner)

    def closure():
        optimizer.zero_grad()
        loss = (params[0].float() - torch.tensor([1.0, 0.5])).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert params[0].tolist() == [1.0, 0.5]
    assert optimizer.targets()[0].dtype is torch.float32


def test_a_closure_does_not_start_with_gradients_of_the_step_before():
    param = torch.nn.Parameter(torch.ones(2, dtype=HALF))
    starts = []

    class Starts(torch.optim.SGD):
        def step(self, closure=None):
            starts.append([p.grad for g in self.param_groups for p in g["params"]])
            loss = closure()
            super().step()
            return loss

    optimizer = master_weights(Starts([param], lr=0.1))

    def closure():
        param.grad = None
        loss = param.float().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert starts == [[None], [None]]


def test_a_master_has_inner_tensors_of_its_own():
    two = torch.testing._internal.two_tensor.TwoTensor
    half = two(torch.ones(2, dtype=HALF), torch.ones(2, dtype=HALF))
    param = torch.nn.Parameter(half)
    param.mark = "decay"
    optimizer = master_weights(torch.optim.SGD([param], lr=0.1))
    (master,) = optimizer.targets()
    assert (master.dtype, master.a.dtype) == (torch.float32, torch.float32)
    assert master.mark == "decay"


def test_a_closure_under_a_scaler_is_refused_as_ever():
    params = halves()
    optimizer = master_weights(torch.optim.SGD(params, lr=0.25))
    with pytest.raises(OrderError, match=r"Closure use is not currently supported"):
        scaled(params).step(optimizer, lambda: None)


# --- what is refused, or returned as it is --------------------------------------------


def test_a_sparse_gradient_is_refused_by_name():
    table = torch.nn.Embedding(4, 2, sparse=True).half()
    optimizer = master_weights(torch.optim.SGD(table.parameters(), lr=0.5))
    table(torch.tensor([1])).float().sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(GradientError, match=r"param_groups\[0\].*sparse_coo.*GS106"):
        optimizer.step()
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("use", ["step", "state_dict"])
def test_the_wrapped_optimizer_is_not_to_be_used_directly(use):
    inner = torch.optim.SGD(halves(), lr=0.5)
    master_weights(inner)
    with pytest.raises(
        OrderError, match=r"SGD was used directly .* that master_weights\(\) returned"
    ):
        getattr(inner, use)()


def test_own_and_wrapped_optimizers_are_returned_as_they_are():
    own = optim.AdamW(halves())
    assert master_weights(own, check_data=True) is own
    assert own.check_data
    wrapped = master_weights(torch.optim.SGD(halves(), lr=0.5))
    assert master_weights(wrapped) is wrapped


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(ConfigError, match=r"was given a list.*Pass the optimizer"):
        master_weights([])


# --- other scalers, modes and machinery -----------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_own_scaler_steps_masters_too(fused):
    params = halves([(1.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=0.5, fused=fused))
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    for value in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(value * params[0].float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert params[0].item() == 0.5


@pytest.mark.parametrize("fused", [False, True])
def test_the_way_of_a_step_says_who_reads_the_flag(fused):
    optimizer = master_weights(torch.optim.AdamW(halves(), fused=fused))
    path = GradScaler("cpu").path(optimizer)
    assert path.way == "masters"
    assert ("without a host sync" in path.meaning) is fused


def test_an_abandoned_step_leaves_nothing_behind():
    params = halves([(1.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=0.5))
    scaler = scaled(params)
    scaler.unscale_(optimizer)
    scaler.reset()
    optimizer.zero_grad()
    scaler.scale(params[0].float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert params[0].item() == 0.5


def test_a_second_step_on_the_same_gradients_unscales_them_again():
    params = halves([(1.0,)])
    optimizer = master_weights(torch.optim.SGD(params, lr=0.25))
    scaler = GradScaler("cpu", 8.0)
    scaler.scale(params[0].float().sum()).backward()
    for unscale in (False, True, False):
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert params[0].item() == 0.25


def test_a_gradient_that_waits_over_an_update_keeps_its_scale():
    first, second = halves([(1.0,), (1.0,)])
    optimizers = [master_weights(torch.optim.SGD([p], lr=0.5)) for p in (first, second)]
    scaler = GradScaler("cpu", 8.0, growth_interval=1)
    scaler.scale(first.float().sum() + second.float().sum()).backward()
    scaler.unscale_(optimizers[1])
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    assert [first.item(), second.item()] == [0.5, 0.5]


def test_a_parameter_that_another_optimizer_has_unscaled_is_refused():
    weight = halves([(1.0,)])[0]
    plain = torch.optim.SGD([weight], lr=0.5)
    optimizer = master_weights(torch.optim.SGD([weight], lr=0.5))
    scaler = GradScaler("cpu", 8.0, allow_fp16=True)
    scaler.scale(weight.float().sum()).backward()
    scaler.unscale_(plain)
    with pytest.raises(GradientError, match="belongs to two optimizers"):
        scaler.step(optimizer)


def test_a_compiled_model_trains():
    model = torch.nn.Linear(2, 1).half()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.125))
    scaler = GradScaler("cpu", 8.0, model=model)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(torch.ones(2, 2, dtype=HALF)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[2] < losses[0]


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("view", [False, True])
def test_a_model_wrapped_by_ddp_trains(one_rank, view):
    model = torch.nn.Linear(2, 1).half()
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=0.125))
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=view
    )
    scaler = GradScaler("cpu", 8.0, model=wrapped)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = wrapped(torch.ones(2, 2, dtype=HALF)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 10.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.skipped_steps == 0
    assert losses[2] < losses[0]


def test_sharded_parameters_have_sharded_masters(one_rank):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(4, 1).half()
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scaler = GradScaler("cpu", 256.0)
    losses = []
    for unscale in (False, True, False):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, dtype=HALF)).float().square().mean()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.skipped_steps == 0
    assert losses[2] < losses[0]
    optimizer.load_state_dict(optimizer.state_dict())
    for param, master in zip(model.parameters(), optimizer.targets(), strict=True):
        assert master.placements == param.placements
        assert master.dtype is torch.float32
