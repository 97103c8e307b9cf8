"""LARC, the fused optimizers, groups added later, schedulers, and fp16_utils."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from gradscale.apex import amp, amp_C, apex_C
from gradscale.apex.amp import _amp_state
from gradscale.apex.fp16_utils import (
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
)
from gradscale.apex.multi_tensor_apply import multi_tensor_applier
from gradscale.apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from gradscale.apex.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from gradscale.apex.parallel.distributed import flat_dist_call
from gradscale.runfile import open_run

X = torch.ones(2)
LEVELS = ["O0", "O1", "O2", "O3"]


class Pair(nn.Module):
    """One weight in f32 and one in f16."""

    def __init__(self, unique):
        super().__init__()
        self.weight0 = nn.Parameter(unique + torch.arange(2, dtype=torch.float32))
        self.weight1 = nn.Parameter(1.0 + unique + torch.arange(2, dtype=torch.float16))

    def forward(self, x):
        return ((x * self.weight0.float()) * self.weight1.float()).sum()


def clear(how, models, optimizer):
    if how == "optimizer":
        optimizer.zero_grad()
    for model in models:
        if how == "model":
            model.zero_grad()
        elif how == "none":
            for param in model.parameters():
                param.grad = None


def run_groups(with_amp, how, zero_first, accumulate):
    """Train one model, add the other's group, train both; return all weights."""
    models = [Pair(1), Pair(2)]
    optimizer = torch.optim.SGD(
        [{"params": models[0].parameters(), "lr": 0.25}], momentum=0.125
    )
    if with_amp is not None:
        _amp_state.allow_incoming_model_not_fp32 = True
        models, optimizer = amp.initialize(
            models, optimizer, opt_level=with_amp, verbosity=0, cast_model_type=False
        )
        _amp_state.loss_scalers[0]._loss_scale = 4.0

    def backward(loss, retain=False):
        if with_amp is None:
            loss.backward(retain_graph=retain)
            return
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward(retain_graph=retain)

    clear(how, models, optimizer)
    backward(models[0](X))
    optimizer.step()
    if zero_first:
        clear(how, models, optimizer)
    optimizer.add_param_group({"params": models[1].parameters(), "lr": 0.5})
    if not zero_first:
        clear(how, models, optimizer)
    for _ in range(2):
        loss = models[0](X) + models[1](X)
        backward(loss, retain=accumulate)
        if accumulate:
            backward(loss)
        optimizer.step()
        clear(how, models, optimizer)
    return [param.detach() for model in models for param in model.parameters()]


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("how", ["none", "model", "optimizer"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_group_can_be_added_after_initialize(level, how, zero_first, accumulate):
    expected = run_groups(None, how, zero_first, accumulate)
    found = run_groups(level, how, zero_first, accumulate)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("level", LEVELS)
def test_larc_steps_at_every_level(level):
    def larc(weight):
        return LARC(torch.optim.SGD([{"params": weight, "lr": 0.25}], momentum=0.125))

    reference = nn.Linear(2, 1)
    model = nn.Linear(2, 1)
    model.load_state_dict(reference.state_dict())
    plain = larc(reference.parameters())
    optimizer = larc(model.parameters())
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    for _ in range(3):
        plain.zero_grad()
        reference(X).sum().backward()
        plain.step()
        optimizer.zero_grad()
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    for a, b in zip(reference.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=2e-3, atol=2e-3)
    assert optimizer.state_dict()["state"]


def test_larc_clips_or_scales_and_decays_before_the_rate():
    for clip, expected in ((True, 3.0 - 0.02 * 3.0), (False, 3.0 - 0.1 * 0.02 * 3.0)):
        weight = nn.Parameter(torch.tensor([3.0]))
        optimizer = LARC(torch.optim.SGD([weight], lr=0.1, weight_decay=0.5), clip=clip)
        (weight * 2.0).sum().backward()
        optimizer.step()
        # Gradient 2 + 0.5 * 3; rate 0.02 * 3 / 3.5.
        assert weight.item() == pytest.approx(expected, rel=1e-5)
        assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_larc_leaves_zeros_alone(zero):
    weight = nn.Parameter(torch.zeros(2) if zero == "weight" else torch.ones(2))
    optimizer = LARC(torch.optim.SGD([weight], lr=0.5))
    (weight * (1.0 if zero == "weight" else 0.0)).sum().backward()
    optimizer.step()
    expected = [-0.5, -0.5] if zero == "weight" else [1.0, 1.0]
    assert weight.tolist() == expected


def step_of(optimizer, weight):
    for scale in (1.0, -2.0, 0.5):
        optimizer.zero_grad()
        (weight * torch.tensor([scale, 1.0])).sum().backward()
        optimizer.step()
    return weight.detach().clone()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
    ],
    ids=["AdamW", "Adam", "SGD"],
)
def test_a_fused_optimizer_steps_as_that_of_torch(ours, theirs):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    torch.testing.assert_close(step_of(ours([a]), a), step_of(theirs([b]), b))


def test_adam_without_bias_correction():
    weight = nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([weight], lr=1.0, bias_correction=False, betas=(0.5, 0.75))
    weight.sum().backward()
    optimizer.step()
    # Moments 0.5 and 0.25, not corrected.
    assert weight.item() == pytest.approx(1.0 - 0.5 / 0.5)


def test_each_group_of_adam_has_its_own_bias_correction():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [a], "bias_correction": False}, {"params": [b]}]
    optimizer = FusedAdam(groups, lr=0.1)
    step_both(optimizer, a, b)
    # Apex: moments 0.1 and 0.001, not corrected.
    assert a.item() == pytest.approx(0.6838, abs=1e-4)
    assert b.item() == pytest.approx(0.9)


def step_both(optimizer, *weights):
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer.step()


def test_a_group_without_bias_correction_is_saved_and_resumed():
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    first = FusedAdam([weights[0]], lr=0.1, bias_correction=False)
    second = FusedAdam([weights[1]], lr=0.1)
    step_both(first, weights[0])
    saved = deepcopy(first.state_dict())
    assert saved["param_groups"][0]["bias_correction"] is False
    second.load_state_dict(saved)
    weights[1].data.copy_(weights[0].data)
    step_both(first, weights[0])
    step_both(second, weights[1])
    assert torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_adam_clips_the_gradients_of_each_group(scale):
    pairs = [[nn.Parameter(torch.ones(2)) for _ in range(2)] for _ in range(2)]
    clipping, plain = (
        FusedAdam([{"params": [p]} for p in pair], lr=0.1, eps=1.0, **settings)
        for pair, settings in zip(pairs, ({"max_grad_norm": 2.0}, {}), strict=True)
    )
    for size, weight, expected in zip((30.0, 1.0), *pairs, strict=True):
        expected.grad = torch.tensor([size, 0.0])
        weight.grad = expected.grad * (scale or 1.0)
    if scale is not None:
        clipping.grad_scale = torch.tensor(scale)
    # Only the first group has a norm above 2.
    pairs[1][0].grad.mul_(2.0 / 30.0)
    clipping.step()
    plain.step()
    for weight, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("count", [1, torch.tensor([1], dtype=torch.int)])
def test_a_checkpoint_of_the_adam_of_apex_is_loaded(bias_correction, count):
    weight, expected = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    settings = {"lr": 0.1, "weight_decay": 0.5, "bias_correction": bias_correction}
    reference = FusedAdam([expected], **settings)
    step_both(reference, expected)
    moments = reference.state[expected]
    state = {n: moments[n].clone() for n in ("exp_avg", "exp_avg_sq")}
    optimizer = FusedAdam([weight])
    # Apex's groups have no `decoupled_weight_decay`, and the states have no `step`.
    group = {**settings, "betas": (0.9, 0.999), "eps": 1e-8, "step": count}
    optimizer.load_state_dict(
        {"state": {0: state}, "param_groups": [{**group, "params": [0]}]}
    )
    weight.data.copy_(expected.data)
    step_both(optimizer, weight)
    step_both(reference, expected)
    assert torch.equal(weight, expected)


def test_a_saved_adam_has_its_step_count_where_apex_reads_it():
    weight = nn.Parameter(torch.ones(1))
    optimizer = FusedAdam([weight])
    for _ in range(3):
        step_both(optimizer, weight)
    assert optimizer.state_dict()["param_groups"][0]["step"] == 3
    assert "step" not in optimizer.param_groups[0]


def lamb_reference(weight, grads, lr, decay, betas=(0.9, 0.999), eps=1e-6):
    """Return the weight after LAMB's steps, by its definition."""
    w, m, v = weight.double(), 0.0, 0.0
    for t, grad in enumerate(grads, start=1):
        g = grad.double() / max(1.0, float(grad.double().norm()))
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        update = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        update = update + decay * w
        ratio = w.norm() / update.norm() if decay else 1.0
        w = w - lr * ratio * update
    return w.float()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_follows_its_definition(decay):
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    start = weight.detach().clone()
    optimizer = FusedLAMB([weight], lr=0.1, weight_decay=decay)
    grads = [torch.randn(3) * 3 for _ in range(4)]
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    expected = lamb_reference(start, grads, 0.1, decay)
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("make", [FusedAdam, FusedSGD, FusedLAMB])
@pytest.mark.parametrize("level", LEVELS)
def test_a_fused_optimizer_trains_at_every_level(make, level):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = make(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x = torch.randn(16, 4)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_settings_that_the_kernels_do_not_have_are_refused():
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="wd_after_momentum"):
        FusedSGD([weight], lr=0.1, wd_after_momentum=True)
    with pytest.raises(RuntimeError, match="amsgrad"):
        FusedLAMB([weight], amsgrad=True)


@pytest.mark.parametrize("first", ["scheduler", "amp"])
def test_a_scheduler_may_be_made_before_or_after(first):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if first == "scheduler":
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    if first == "amp":
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    # The first step is skipped; torch must not warn about the order.
    for factor in (float("inf"), 1.0):
        with amp.scale_loss(model(X).sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_the_optimizer_stays_the_same_object():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, returned = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert returned is optimizer
    assert isinstance(returned, torch.optim.SGD)


class Around(torch.optim.Optimizer):
    """A wrapper without `super().__init__()`, as public versions of Lookahead."""

    def __init__(self, optimizer, name="optimizer"):
        vars(self)[name] = optimizer
        self.inner = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapper_without_hooks_trains_and_is_saved(level):
    model = nn.Linear(2, 1)
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        # Small enough for the first scale.
        loss = model(X).float().square().mean()
        with amp.scale_loss(loss / 16.0, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    saved = optimizer.state_dict()
    masters = [state.get("master") is not None for state in saved["state"].values()]
    assert masters == [level == "O2"] * 2
    optimizer.load_state_dict(saved)


def test_a_wrapper_whose_masters_could_not_be_saved_is_refused():
    model = nn.Linear(2, 1)
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1), name="base")
    with pytest.raises(RuntimeError, match=r"Around has not called super.*GS101"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert model.weight.dtype is torch.float32
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


# --- multi_tensor_apply and parallel --------------------------------------------------


def test_multi_tensor_operations():
    flag = torch.zeros(1, dtype=torch.int)
    xs, ys = (
        [torch.full((3,), 4.0), torch.ones(2).half()],
        [torch.ones(3), torch.ones(2)],
    )
    out = [torch.empty(3), torch.empty(2).half()]
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [xs, ys, out], 2.0, 8.0, -1)
    assert [o.tolist() for o in out] == [[16.0] * 3, [10.0] * 2]
    norm, each = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [xs], True)
    assert norm.item() == pytest.approx(50.0**0.5)
    assert each.tolist() == pytest.approx([48.0**0.5, 2.0**0.5])
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [xs, out], 0.5)
    assert out[0].tolist() == [2.0] * 3
    half = torch.tensor([0.5])
    norm, each = multi_tensor_applier(
        amp_C.multi_tensor_unscale_l2norm, flag, [xs], half, True
    )
    assert norm.item() == pytest.approx(12.5**0.5)
    assert each.tolist() == pytest.approx([12.0**0.5, 0.5**0.5])
    assert flag.item() == 0


def test_flat_tensors_and_their_views():
    tensors = [torch.ones(2, 2), torch.full((3,), 2.0)]
    flat = apex_C.flatten(tensors)
    assert flat.tolist() == [1.0] * 4 + [2.0] * 3
    views = apex_C.unflatten(flat, tensors)
    views[1].zero_()
    assert flat.tolist() == [1.0] * 4 + [0.0] * 3


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("checked", [0, 1, -1])
def test_multi_tensor_operations_flag_what_is_not_finite(value, checked):
    good, bad = [torch.ones(3)], [torch.tensor([1.0, value, 1.0])]
    for lists, seen in (([bad, good], checked != 1), ([good, bad], checked != 0)):
        flag = torch.zeros(1, dtype=torch.int)
        out = [torch.empty(3)]
        multi_tensor_applier(
            amp_C.multi_tensor_axpby, flag, [*lists, out], 1.0, 1.0, checked
        )
        assert flag.item() == seen


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapped_model_trains(one_rank, level):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0
    )
    model = DistributedDataParallel(model, message_size=1, delay_allreduce=True)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as scaled:
            scaled.backward()
        grads = [
            param.grad.flatten().tolist() for param in amp.master_params(optimizer)
        ]
        assert grads == [[2.0] * 4, [2.0]]
        optimizer.step()


def test_the_parallel_helpers(one_rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert isinstance(convert_syncbn_model(model)[1], nn.SyncBatchNorm)
    model[0](X).sum().backward()
    grad = model[0].weight.grad.clone()
    Reducer(model[0]).reduce()
    assert torch.equal(model[0].weight.grad, grad)
    assert create_syncbn_process_group(0) is None
    assert create_syncbn_process_group(1) is not None
    with pytest.raises(RuntimeError, match="group_size=2"):
        create_syncbn_process_group(2)
    with pytest.raises(RuntimeError, match="gradient_average"):
        DistributedDataParallel(model[0], gradient_average=False)


def test_a_predivide_factor_changes_no_average(one_rank):
    model = DistributedDataParallel(nn.Linear(2, 1), gradient_predivide_factor=8.0)
    model(X).sum().backward()
    assert [p.grad.flatten().tolist() for p in model.parameters()] == [[1.0] * 2, [1.0]]


def test_a_flat_call_changes_every_tensor_in_place(one_rank, monkeypatch):
    tensors = [nn.Parameter(torch.ones(2)), torch.ones(3), torch.ones(1).half()]
    flat_dist_call(tensors, lambda flat, factor: flat.mul_(factor), (3.0,))
    assert [t.tolist() for t in tensors] == [[3.0] * 2, [3.0] * 3, [3.0]]
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    flat_dist_call(tensors, torch.distributed.all_reduce)
    assert [t.tolist() for t in tensors] == [[1.5] * 2, [1.5] * 3, [1.5]]


# --- fp16_utils -----------------------------------------------------------------------


class Block(nn.Module):
    """A batch norm with weights before a convolution."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.plain = nn.BatchNorm2d(3, affine=False)
        self.conv = nn.Conv2d(3, 3, 2)

    def forward(self, x):
        return self.conv(self.plain(self.bn(x)))


def test_fp16_model_keeps_batch_norms_with_weights_in_f32():
    model = FP16Model(Block())
    found = {
        name: {
            t.dtype for t in (*m.parameters(), *m.buffers()) if t.is_floating_point()
        }
        for name, m in model.network.named_children()
    }
    assert found == {
        "bn": {torch.float32},
        "plain": {torch.float16},
        "conv": {torch.float16},
    }
    assert model(torch.randn(2, 3, 4, 4)).dtype is torch.float16


def test_network_to_half_casts_its_input():
    model = network_to_half(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    assert model(torch.randn(2, 3, 4, 4)).dtype is torch.float16
    assert model[1][1].weight.dtype is torch.float32


@pytest.mark.parametrize("flat", [True, False])
def test_masters_by_hand(flat):
    model = nn.Linear(2, 1).half()
    params, masters = prep_param_lists(model, flat_master=flat)
    optimizer = torch.optim.SGD(masters, lr=0.5)
    before = [param.detach().clone() for param in params]
    model(X.half()).sum().backward()
    model_grads_to_master_grads(params, masters, flat_master=flat)
    assert clip_grad_norm(masters, 10.0).item() == pytest.approx(3.0**0.5)
    optimizer.step()
    master_params_to_model_params(params, masters, flat_master=flat)
    for old, new in zip(before, params, strict=True):
        torch.testing.assert_close(old - 0.5, new.detach(), rtol=1e-3, atol=1e-3)
    assert to_python_float(torch.tensor(2.0)) == 2.0


def test_one_flat_master_needs_one_dtype():
    model = nn.Sequential(nn.Linear(2, 1).half(), nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="flat_master"):
        prep_param_lists(model, flat_master=True)


def fp16_optimizer(**settings):
    torch.manual_seed(3)
    model = network_to_half(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    return model, FP16_Optimizer(optimizer, verbose=False, **settings)


def test_fp16_optimizer_steps_masters_and_skips_overflow():
    model, optimizer = fp16_optimizer(
        dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10}
    )
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.backward(model(X).sum().float() * float("inf"))
    optimizer.step()
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert not optimizer.last.applied
    assert optimizer.loss_scale == 512.0
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    optimizer.backward(model(X).sum().float(), update_master_grads=False)
    optimizer.backward(model(X).sum().float())
    assert [p.grad.flatten().tolist() for p in masters] == [[2.0, 2.0], [2.0]]
    optimizer.step()
    assert optimizer.last.applied
    assert not any(map(torch.equal, before, model.parameters()))


def test_fp16_optimizer_with_a_fixed_scale_skips_too():
    model, optimizer = fp16_optimizer(static_loss_scale=128.0)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.backward(model(X).sum().float() * float("nan"))
    optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.loss_scale == 128.0


def test_the_last_outcome_of_an_fp16_optimizer_names_verdict_and_culprits():
    model, optimizer = fp16_optimizer(dynamic_loss_scale=True)
    optimizer.loss_scale = 64.0
    optimizer.backward(model(X).sum().float())
    optimizer.step()
    assert optimizer.last.verdict.name == "OK"
    optimizer.zero_grad()
    optimizer.backward(model(X).sum().float() * float("nan"))
    optimizer.step()
    assert optimizer.last.verdict.name == "FORWARD_NONFINITE"
    assert optimizer.last.culprits == tuple(
        f"param_groups[0]['params'][{i}]" for i in range(2)
    )


def test_fp16_optimizer_is_recorded_by_gradscale_run(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADSCALE_RUN_FILE", str(tmp_path / "run.gs"))
    monkeypatch.setenv("GRADSCALE_RUN_NOTES", str(tmp_path / "notes"))
    model, optimizer = fp16_optimizer(static_loss_scale=128.0)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        optimizer.backward(factor * model(X).sum().float())
        optimizer.step()
    optimizer.log.recording.close()
    with open_run(tmp_path / "run.gs") as run:
        rows = [(row.scale, row.applied) for row in run.steps()]
    assert rows == [(128.0, True), (128.0, False)]


def test_fp16_optimizer_resumes():
    model, optimizer = fp16_optimizer(dynamic_loss_scale=True)
    optimizer.loss_scale = 64.0

    def train(model, optimizer):
        optimizer.zero_grad(set_grads_to_None=True)
        optimizer.backward(model(X).sum().float())
        optimizer.step()

    train(model, optimizer)
    # A copy, as a file is.
    state, weights = deepcopy((optimizer.state_dict(), model.state_dict()))
    other, again = fp16_optimizer(dynamic_loss_scale=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    assert again.loss_scale == 64.0
    train(model, optimizer)
    train(other, again)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_fp16_optimizer_evaluates_a_closure_at_a_lower_scale():
    model, optimizer = fp16_optimizer(
        dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**20}
    )
    scales = []

    def closure():
        scales.append(optimizer.loss_scale)
        optimizer.zero_grad()
        loss = model(X).sum().float()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    # 2^20 does not fit float16, nor does 2^16.
    assert scales[-1] == 2.0**15
    assert not optimizer.overflow


def test_fp16_optimizer_is_not_pickled():
    with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
        fp16_optimizer()[1].__getstate__()


def test_a_fixed_scaler_multiplies_by_hand():
    scaler = LossScaler(8.0)
    weight = nn.Parameter(torch.ones(1))
    scaler.backward(weight.sum())
    assert weight.grad.item() == 8.0
    assert scaler.scale_gradient(None, (torch.ones(1), None), None) == (8.0, None)
    assert not scaler.has_overflow([weight])
    weight.grad.fill_(float("nan"))
    assert scaler.has_overflow([weight])
