"""Several models, optimizers and losses: an inf skips what it touches, all else steps.

The reference of each case is plain torch without amp, with the skipped steps left out.
"""

from itertools import product

import pytest
import torch
from torch import nn

from gradscale.apex import amp, amp_C
from gradscale.apex.amp import _amp_state
from gradscale.apex.optimizers import FusedSGD
from gradscale.errors import OrderError

X = torch.ones(2)


class Pair(nn.Module):
    """One weight in f32 and one in f16, whatever the level."""

    def __init__(self, unique):
        super().__init__()
        self.weight0 = nn.Parameter(unique + torch.arange(2, dtype=torch.float32))
        self.weight1 = nn.Parameter(1.0 + unique + torch.arange(2, dtype=torch.float16))

    def forward(self, x):
        return ((x * self.weight0.float()) * self.weight1.float()).sum()


def sgd(groups, momentum):
    return torch.optim.SGD(groups, momentum=momentum)


class Setup:
    """A way to spread models over optimizers and losses.

    Attributes:
        models: Their number.
        groups: For each optimizer, (model, lr) pairs and its momentum.
        losses: For each loss, the models that it adds up, and the optimizers that its
            scale_loss is given.
    """

    def __init__(self, models, groups, losses):
        self.models, self.groups, self.losses = models, groups, losses

    def make(self, optimizer_class=sgd, **settings):
        models = [Pair(i + 1) for i in range(self.models)]
        optimizers = [
            optimizer_class(
                [{"params": models[m].parameters(), "lr": lr} for m, lr in held],
                momentum=momentum,
                **settings,
            )
            for held, momentum in self.groups
        ]
        return models, optimizers


SETUPS = {
    "2 models 2 losses 1 optimizer": Setup(
        2, [([(0, 0.25), (1, 0.5)], 0.125)], [((0,), (0,)), ((1,), (0,))]
    ),
    "3 models 2 losses 1 optimizer": Setup(
        3,
        [([(0, 0.25), (1, 0.5), (2, 0.125)], 0.125)],
        [((0, 2), (0,)), ((1, 2), (0,))],
    ),
    "2 models 2 losses 2 optimizers": Setup(
        2, [([(0, 0.25)], 0.125), ([(1, 0.5)], 0.25)], [((0,), (0,)), ((1,), (1,))]
    ),
    "3 models 2 losses 2 optimizers": Setup(
        3,
        [([(0, 0.25), (1, 1.0)], 0.5), ([(2, 0.5)], 0.25)],
        [((0, 1), (0,)), ((2, 1), (0, 1))],
    ),
}


def params_of(models):
    return [param for model in models for param in model.parameters()]


def reference(setup, iterations, skips):
    """Train without amp; return the gradients of each iteration and the weights.

    Args:
        setup: The setup.
        iterations: Their number.
        skips: Pairs of an iteration and an optimizer whose step is left out.
    """
    models, optimizers = setup.make()
    grads = []
    for i in range(iterations):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for held, _ in setup.losses:
            sum(models[m](X) for m in held).backward()
        grads.append([param.grad.clone() for param in params_of(models)])
        for o, optimizer in enumerate(optimizers):
            if (i, o) not in skips:
                optimizer.step()
    return grads, [param.detach().clone() for param in params_of(models)]


def zero(how, models, optimizers):
    if how == "none":
        for param in params_of(models):
            param.grad = None
    elif how == "model":
        for model in models:
            model.zero_grad()
    else:
        for optimizer in optimizers:
            optimizer.zero_grad()


def infs(setup):
    """Yield None, and every iteration, loss, model and weight that can get an inf."""
    yield None
    for i, (number, (held, _)) in product((0, 1), enumerate(setup.losses)):
        for model, weight in product(held, ("weight0", "weight1")):
            yield i, number, model, weight


def train(setup, level, how, scalers, inf, **options):
    """Train with amp, an inf in one gradient; compare with the reference."""
    iterations = 2 if inf is None else 3
    skipped = () if inf is None else setup.losses[inf[1]][1]
    grads, final = reference(
        setup, iterations, [(inf[0], o) for o in skipped] if inf else []
    )
    models, optimizers = setup.make(**options)
    _amp_state.allow_incoming_model_not_fp32 = True
    models, optimizers = amp.initialize(
        models,
        optimizers,
        opt_level=level,
        verbosity=0,
        cast_model_type=False,
        num_losses=scalers,
    )
    for scaler, scale in zip(_amp_state.loss_scalers, (4.0, 16.0), strict=False):
        scaler._loss_scale = scale
    for i in range(iterations):
        zero(how, models, optimizers)
        losses = [sum(models[m](X) for m in held) for held, _ in setup.losses]
        for number, (loss, (_, given)) in enumerate(
            zip(losses, setup.losses, strict=True)
        ):
            to = [optimizers[o] for o in given]
            with amp.scale_loss(loss, to, loss_id=number % scalers) as scaled:
                scaled.backward()
                if inf is not None and inf[:2] == (i, number):
                    getattr(models[inf[2]], inf[3]).grad[0] = float("inf")
        if inf is None or i != inf[0]:
            masters = {
                id(p): master
                for optimizer in optimizers
                for p, master in zip(
                    optimizer._amp_stash.params(),
                    amp.master_params(optimizer),
                    strict=True,
                )
            }
            for param, grad in zip(params_of(models), grads[i], strict=True):
                assert torch.equal(masters[id(param)].grad.float(), grad.float())
        for optimizer in optimizers:
            optimizer.step()
    for param, expected in zip(params_of(models), final, strict=True):
        torch.testing.assert_close(param.detach(), expected)
    for optimizer in optimizers:
        pairs = zip(
            optimizer._amp_stash.params(), amp.master_params(optimizer), strict=True
        )
        for param, master in pairs:
            assert torch.equal(param, master.to(param.dtype))


@pytest.mark.parametrize("scalers", [1, 2])
@pytest.mark.parametrize("how", ["none", "model", "optimizer"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", SETUPS)
def test_an_inf_in_any_gradient_skips_the_optimizers_of_its_loss(
    name, level, how, scalers
):
    setup = SETUPS[name]
    cases = list(infs(setup)) if level in ("O1", "O2") else [None]
    for inf in cases:
        train(setup, level, how, scalers, inf)


@pytest.mark.parametrize("materialize", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", SETUPS)
def test_fused_sgd_does_the_same(name, level, materialize):
    setup = SETUPS[name]
    # One inf in each loss.
    cases = [None, *list(infs(setup))[1::4]] if level in ("O1", "O2") else [None]
    options = {
        "optimizer_class": FusedSGD,
        "materialize_master_grads": materialize,
    }
    for inf in cases:
        train(setup, level, "optimizer", 2, inf, **options)


def test_an_overflow_lowers_only_its_own_scale():
    setup = SETUPS["2 models 2 losses 2 optimizers"]
    train(setup, "O2", "none", 2, (0, 0, 0, "weight1"))
    scales = [scaler.loss_scale() for scaler in _amp_state.loss_scalers]
    counts = [scaler._unskipped for scaler in _amp_state.loss_scalers]
    assert scales == [2.0, 16.0]
    assert counts == [2, 3]


# --- accumulation and delays ----------------------------------------------------------


def model_and_optimizer(level, *, dynamic=False, **settings):
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scale = "dynamic" if dynamic else 1024.0
    made = amp.initialize(
        model, optimizer, opt_level=level, loss_scale=scale, verbosity=0, **settings
    )
    _amp_state.loss_scalers[0]._loss_scale = 1024.0
    return made


BATCHES = [torch.full((2, 4), value) for value in (0.5, 1.0, 2.0)]


def backward(model, optimizer, batch, **settings):
    with amp.scale_loss(model(batch).float().sum(), optimizer, **settings) as scaled:
        scaled.backward()


def grads_of(optimizer):
    return [
        param.grad.float().flatten().tolist() for param in amp.master_params(optimizer)
    ]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("delays", [(0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0)])
def test_gradients_accumulate_whatever_is_delayed(level, delays):
    model, optimizer = model_and_optimizer(level)
    for batch, delay in zip(BATCHES, delays, strict=True):
        backward(model, optimizer, batch, delay_unscale=bool(delay))
    assert grads_of(optimizer) == [[7.0] * 4, [6.0]]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_scale_that_changes_inside_a_window_is_taken_into_account(level):
    model, optimizer = model_and_optimizer(level)
    backward(model, optimizer, BATCHES[0], delay_unscale=True)
    _amp_state.loss_scalers[0]._loss_scale = 256.0
    backward(model, optimizer, BATCHES[1])
    assert grads_of(optimizer) == [[3.0] * 4, [4.0]]


def test_a_step_with_scaled_gradients_is_refused():
    model, optimizer = model_and_optimizer("O2")
    backward(model, optimizer, BATCHES[0], delay_unscale=True)
    with pytest.raises(RuntimeError, match="delay_unscale"):
        optimizer.step()


def failing_backward(model, optimizer):
    with amp.scale_loss(model(BATCHES[0]).sum(), optimizer) as scaled:
        scaled.backward()
        raise KeyError


@pytest.mark.parametrize("clear", ["optimizer", "error"])
def test_a_window_that_is_given_up_leaves_no_gradient(clear):
    model, optimizer = model_and_optimizer("O2")
    if clear == "optimizer":
        backward(model, optimizer, BATCHES[0], delay_unscale=True)
        optimizer.zero_grad()
    else:
        with pytest.raises(KeyError):
            failing_backward(model, optimizer)
    backward(model, optimizer, BATCHES[1])
    assert grads_of(optimizer) == [[2.0] * 4, [2.0]]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_gradients_may_be_cleared_inside_the_block(level):
    model, optimizer = model_and_optimizer(level)
    backward(model, optimizer, BATCHES[0])
    with amp.scale_loss(model(BATCHES[1]).sum(), optimizer) as scaled:
        optimizer.zero_grad()
        scaled.backward()
    inside = grads_of(optimizer)
    optimizer.zero_grad()
    backward(model, optimizer, BATCHES[1])
    assert grads_of(optimizer) == inside


def test_nested_blocks_of_one_optimizer_are_refused():
    model, optimizer = model_and_optimizer("O2", num_losses=2)
    losses = [model(batch).sum() for batch in BATCHES[:2]]
    with (
        pytest.raises(OrderError, match=r"inside another one.*one block after"),
        amp.scale_loss(losses[0], optimizer, 0) as first,
        amp.scale_loss(losses[1], optimizer, 1) as second,
    ):
        (first + second).backward()
    optimizer.zero_grad()
    backward(model, optimizer, BATCHES[1])
    assert grads_of(optimizer) == [[2.0] * 4, [2.0]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_delayed_check_is_made_in_the_step(level):
    model, optimizer = model_and_optimizer(level)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    before = [param.detach().clone() for param in model.parameters()]
    backward(model, optimizer, 1e38 * BATCHES[0], delay_overflow_check=True)
    assert amp.last is None
    optimizer.step()
    assert not amp.last.applied
    assert all(map(torch.equal, model.parameters(), before))
    assert other.param_groups[0]["params"][0].item() == 1.0


def checked_by_the_script(optimizer):
    """Check and step as NVIDIA's BERT does once all gradients are reduced."""
    flag = torch.zeros(1, dtype=torch.int)
    grads = [param.grad for param in amp.master_params(optimizer)]
    amp_C.multi_tensor_scale(65536, flag, [grads, grads], 1.0)
    scaler = _amp_state.loss_scalers[0]
    scaler._overflow_buf = flag
    overflow = scaler.update_scale()
    if not overflow:
        optimizer.step()
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None
    return overflow


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_can_check_the_gradients_itself(level, exact):
    model, optimizer = model_and_optimizer(level, exact=exact, dynamic=True)
    scaler = _amp_state.loss_scalers[0]
    before = [param.detach().clone() for param in model.parameters()]

    def window(factor):
        for _ in range(2):
            loss = model(BATCHES[0]).float().sum() * factor
            with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled:
                scaled.backward()
        return checked_by_the_script(optimizer)

    assert window(float("inf"))
    assert not scaler.last.applied
    assert scaler.state_dict() == {"loss_scale": 512.0, "unskipped": 0}
    model.zero_grad()
    # One check moves the scale once, however many passes were delayed.
    assert not window(1.0)
    assert scaler.last.applied
    assert scaler.state_dict() == {"loss_scale": 512.0, "unskipped": 1}
    assert not any(map(torch.equal, model.parameters(), before))


def test_exact_never_makes_a_delayed_check():
    model, optimizer = model_and_optimizer("O0", exact=True)
    backward(model, optimizer, 1e38 * BATCHES[0], delay_overflow_check=True)
    optimizer.step()
    assert not torch.isfinite(model.weight).all()


def test_a_fixed_scale_skips_by_default_and_steps_if_exact():
    model, optimizer = model_and_optimizer("O0")
    backward(model, optimizer, 1e38 * BATCHES[0])
    optimizer.step()
    assert torch.isfinite(model.weight).all()
    model, optimizer = model_and_optimizer("O0", exact=True)
    backward(model, optimizer, 1e38 * BATCHES[0])
    optimizer.step()
    assert not torch.isfinite(model.weight).all()


def test_clipping_the_masters_clips_the_step():
    model, optimizer = model_and_optimizer("O2")
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    backward(model, optimizer, BATCHES[2])
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
    assert norm.item() == pytest.approx((4 * 16 + 4) ** 0.5)
    optimizer.step()
    moved = [a - b for a, b in zip(before, amp.master_params(optimizer), strict=True)]
    total = torch.cat([m.flatten() for m in moved]).norm().item()
    assert total == pytest.approx(0.5 * 0.1, rel=1e-4)


def test_a_closure_is_refused_with_masters_and_taken_at_o1():
    _, optimizer = model_and_optimizer("O2")
    with pytest.raises(RuntimeError, match="given a closure"):
        optimizer.step(lambda: None)
    _, optimizer = model_and_optimizer("O1")
    assert optimizer.step(lambda: torch.tensor(3.0)).item() == 3.0


def test_sparse_gradients_are_unscaled():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O0", loss_scale=8.0, verbosity=0
    )
    with amp.scale_loss(model(torch.tensor([1, 1])).sum(), optimizer) as scaled:
        scaled.backward()
    assert model.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


def test_a_frozen_parameter_has_no_master_until_it_is_trained():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert [p.dtype for p in amp.master_params(optimizer)] == [
        torch.float32,
        torch.float16,
    ]
    model.bias.requires_grad_(True)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
