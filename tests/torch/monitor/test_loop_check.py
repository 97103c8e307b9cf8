"""A wrong use of the scaler is found in the smallest loop that has it, and no other."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from gradscale.diagnosis import diagnose_run
from gradscale.errors import GradscaleWarning
from gradscale.runfile import open_run
from gradscale.torch import GradScaler
from gradscale.torch.locate.autograd_graph import half_dtype
from gradscale.torch.monitor import loop_check
from gradscale.torch.monitor.loop_check import EVERY
from gradscale.torch.monitor.step_hook import StepHook
from tests.torch.training import iterate, parameter, planted

UPDATES = 30


class Loop:
    """A model, its optimizer and a recorded scaler, and the parts of an iteration."""

    def __init__(self, path, dtype=torch.float16, weights=torch.float32):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        self.model.to(weights)
        self.params = list(self.model.parameters())
        self.dtype, self.weights, self.path = dtype, weights, path
        self.optimizer = torch.optim.SGD(self.params, lr=1e-4)
        self.scaler = GradScaler(
            "cpu", init_scale=1024.0, record=path, model=self.model, allow_fp16=True
        )

    def loss(self):
        x = torch.randn(4, 4, dtype=self.weights)
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            return (self.model(x).float() - x.float().sum(1, True)).square().mean()

    def backward(self):
        self.scaler.scale(self.loss()).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def causes(self):
        """Close the file; return the causes that are diagnosed from it."""
        self.scaler.close()
        with open_run(self.path) as run:
            return {finding.cause for finding in diagnose_run(run).serious}


def repeated(iteration, **options):
    """Return a test case: an iteration, and how its loop is made."""

    def run(path):
        loop = Loop(path, **options)
        for number in range(1, UPDATES + 1):
            iteration(loop, number)
        return loop.causes()

    return run


# --- Wrong uses -----------------------------------------------------------------------


def clipped_while_scaled(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    nn.utils.clip_grad_norm_(loop.params, 1.0)
    loop.step()


def clipped_by_value_while_scaled(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    nn.utils.clip_grad_value_(loop.params, 0.5)
    loop.step()


def divided_by_hand(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    for param in loop.params:
        param.grad.div_(loop.scaler.get_scale())
    loop.step()


def backward_on_the_loss(loop, number):
    loop.optimizer.zero_grad()
    loss = loop.loss()
    loop.scaler.scale(loss)
    loss.backward()
    loop.step()


def second_loss_not_scaled(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.loss().backward()
    loop.step()


def first_loss_not_scaled(loop, number):
    loop.optimizer.zero_grad(set_to_none=False)
    loop.loss().backward()
    loop.backward()
    loop.step()


def penalty_of_a_layer_not_scaled(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    (0.1 * loop.model[2].weight.square().sum()).backward()
    loop.step()


def stepped_directly_at_first(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    if number <= 5:
        loop.optimizer.step()
    else:
        loop.step()


def stepped_directly_throughout(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()


def stepped_directly(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.optimizer.step()
    loop.step()


def never_cleared(loop, number):
    loop.backward()
    loop.step()


def cleared_before_the_step(loop, number):
    loop.backward()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.step()


def updated_in_every_micro_batch(loop, number):
    if number % 4 == 1:
        loop.optimizer.zero_grad()
    loop.backward()
    loop.step()


def updated_in_all_but_the_last_of_eight(loop, number):
    if number % 8 == 1:
        loop.optimizer.zero_grad()
    loop.backward()
    if number % 8:
        loop.step()


def updated_in_every_one_of_sixteen(loop, number):
    if number % 16 == 1:
        loop.optimizer.zero_grad()
    loop.backward()
    loop.step()


def hook_all(loop, hook):
    """Register a hook on all parameters of a loop, once."""
    for param in loop.params:
        if not param._backward_hooks:
            param.register_hook(hook)


def clamped_by_hooks_while_scaled(loop, number):
    hook_all(loop, lambda grad: grad.clamp(-0.01, 0.01))
    plain(loop, number)


def divided_after_unscaling(loop, number):
    loop.scaler.set_growth_interval(5)
    loop.optimizer.zero_grad()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    torch._foreach_div_([p.grad for p in loop.params], loop.scaler.get_scale())
    loop.step()


def cleared_in_every_micro_batch(loop, number):
    for _ in range(3):
        loop.optimizer.zero_grad()
        loop.backward()
    loop.step()


def left_out_after_a_while(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    if number <= 12:
        loop.step()


def updated_after_each_optimizer(loop, number):
    for optimizer in loop.optimizers:
        optimizer.zero_grad()
    loop.backward()
    for optimizer in loop.optimizers:
        loop.scaler.step(optimizer)
        loop.scaler.update()


def several_optimizers(path):
    """Run a loop that updates the scaler once for each of three optimizers."""
    loop = Loop(path)
    first, *_, last = loop.params
    loop.optimizers = [
        torch.optim.SGD(params, lr=1e-4)
        for params in ([first], loop.params[1:-1], [last])
    ]
    for number in range(1, UPDATES + 1):
        updated_after_each_optimizer(loop, number)
    return loop.causes()


WRONG = {
    "clip_grad_norm_": (repeated(clipped_while_scaled), "clipped-scaled"),
    "clip_grad_value_": (repeated(clipped_by_value_while_scaled), "clipped-scaled"),
    "divided": (repeated(divided_by_hand), "unscaled-twice"),
    "divided later": (repeated(divided_after_unscaling), "unscaled-twice"),
    "loss.backward()": (repeated(backward_on_the_loss), "backward-unscaled"),
    "second loss": (repeated(second_loss_not_scaled), "backward-unscaled"),
    "first loss": (repeated(first_loss_not_scaled), "backward-unscaled"),
    "penalty": (repeated(penalty_of_a_layer_not_scaled), "backward-unscaled"),
    "optimizer.step()": (repeated(stepped_directly), "stepped-directly"),
    "first optimizer.step()s": (
        repeated(stepped_directly_at_first),
        "stepped-directly",
    ),
    "no zero_grad": (repeated(never_cleared), "never-zeroed"),
    "zero_grad to 0": (repeated(cleared_before_the_step), "zeroed-early"),
    "zero_grad in micro-batches": (
        repeated(cleared_in_every_micro_batch),
        "zeroed-early",
    ),
    "micro-batches": (repeated(updated_in_every_micro_batch), "update-too-often"),
    "7 of 8 micro-batches": (
        repeated(updated_in_all_but_the_last_of_eight),
        "update-too-often",
    ),
    "16 micro-batches": (repeated(updated_in_every_one_of_sixteen), "update-too-often"),
    "update() for each optimizer": (several_optimizers, "update-too-often"),
    "clamp in hooks": (repeated(clamped_by_hooks_while_scaled), "clipped-scaled"),
    "no step": (repeated(left_out_after_a_while), "update-missing"),
}


# Some are warned of at the first step too.
@pytest.mark.filterwarnings("ignore:.*first step:gradscale.GradscaleWarning")
@pytest.mark.parametrize(("run", "cause"), WRONG.values(), ids=WRONG)
def test_a_wrong_use_is_the_one_cause_that_is_found(tmp_path, run, cause):
    assert run(tmp_path / "run.gs") == {cause}


def test_steps_that_no_update_follows_are_reported(tmp_path, caplog):
    loop = Loop(tmp_path / "run.gs")
    for number in range(12):
        stepped_directly_throughout(loop, number)
    loop.scaler.close()
    codes = [record.getMessage()[:5] for record in caplog.records]
    assert codes == ["GS115", "GS123"]


def test_direct_steps_are_blamed_for_weights_that_are_not_finite(tmp_path):
    loop = Loop(tmp_path / "run.gs")
    for number in range(12):
        loop.optimizer.zero_grad()
        loop.backward()
        loop.scaler.unscale_(loop.optimizer)
        if number == 4:
            loop.params[0].grad.fill_(torch.inf)
        loop.optimizer.step()
        loop.scaler.update()
    assert loop.causes() == {"stepped-directly"}


def test_the_part_of_a_model_that_is_not_cleared_is_named(tmp_path):
    loop = Loop(tmp_path / "run.gs")
    for _ in range(UPDATES):
        loop.model[0].zero_grad()
        loop.backward()
        loop.step()
    loop.scaler.close()
    with open_run(loop.path) as run:
        [finding] = diagnose_run(run).serious
    assert (finding.cause, finding.where) == ("never-zeroed", "2")


@pytest.mark.filterwarnings(
    "ignore:.*No parameter.*gradient.*:gradscale.GradscaleWarning"
)
def test_gradients_that_are_gone_before_the_step_are_found(tmp_path):
    def cleared(loop, number):
        loop.backward()
        loop.optimizer.zero_grad()
        loop.step()

    assert repeated(cleared)(tmp_path / "run.gs") == {"zeroed-early", "no-gradients"}


def test_a_parameter_that_was_replaced_after_the_optimizer_was_made_is_found(tmp_path):
    loop = Loop(tmp_path / "run.gs")
    loop.model[2] = nn.Linear(4, 1)
    for _ in range(8):
        loop.model.zero_grad()
        loop.backward()
        loop.step()
    loop.scaler.close()
    with open_run(loop.path) as run:
        [finding] = diagnose_run(run).serious
    assert (finding.code, finding.where) == ("GS119", "2.weight")
    assert finding.what == (
        "2 parameters have gradients and are in no optimizer: 2.weight, 2.bias"
    )


def test_parameters_that_are_unfrozen_later_are_found(tmp_path):
    loop = Loop(tmp_path / "run.gs")
    loop.model[0].requires_grad_(False)
    loop.optimizer = torch.optim.SGD(loop.model[2].parameters(), lr=1e-4)
    for number in range(1, 70):
        loop.model[0].requires_grad_(number > 40)
        plain(loop, number)
    assert loop.causes() == {"not-in-optimizer"}


class Listed(nn.Module):
    """A model with a block in a plain list."""

    def __init__(self):
        super().__init__()
        self.blocks = [nn.Linear(4, 4)]
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.blocks[0](x))


def test_a_module_in_a_plain_list_is_found(tmp_path):
    loop = Loop(tmp_path / "run.gs")
    loop.model = Listed()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-4)
    for number in range(1, 9):
        plain(loop, number)
    loop.scaler.close()
    with open_run(loop.path) as run:
        [finding] = diagnose_run(run).serious
    assert (finding.code, finding.where) == ("GS119", "blocks.0.weight")


@pytest.mark.parametrize(
    ("weight", "found"), [(1e-12, {"scale-too-low"}), (0.0, set())]
)
def test_a_head_whose_gradients_a_cast_flushes_is_found(tmp_path, weight, found):
    loop = Loop(tmp_path / "run.gs")
    trunk, heads = loop.model, nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
    loop.model = nn.ModuleList([trunk, heads])
    loop.optimizer = torch.optim.SGD(heads.parameters(), lr=1e-4)
    for _ in range(UPDATES):
        x = torch.randn(4, 16)
        loop.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            large, small = (head(x).float().square().mean() for head in heads)
        loop.scaler.scale(0.01 * large + weight * small).backward()
        loop.step()
    assert loop.causes() == found


def test_unscaling_in_the_middle_of_a_window_is_found(tmp_path):
    loop = Loop(tmp_path / "run.gs")

    def window():
        loop.optimizer.zero_grad()
        loop.backward()
        loop.scaler.unscale_(loop.optimizer)
        loop.backward()
        loop.step()

    with pytest.warns(GradscaleWarning, match="GS104"):
        window()
    assert loop.causes() == {"unscaled-twice"}


def plain(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.step()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"dtype": None}, "no-float16"),
        ({"dtype": torch.bfloat16}, "no-float16"),
        ({"dtype": None, "weights": torch.float16}, "fp16-weights"),
    ],
    ids=["float32", "bfloat16", "float16 weights"],
)
def test_the_dtypes_of_model_and_loss_are_checked(tmp_path, options, cause):
    assert repeated(plain, **options)(tmp_path / "run.gs") == {cause}


# --- Healthy loops --------------------------------------------------------------------


def cleared_to_0(loop, number):
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    loop.step()


def cleared_after_the_step(loop, number):
    loop.backward()
    loop.step()
    loop.optimizer.zero_grad()


def clipped_after_unscaling(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.params, 1e-3)
    loop.step()


def clipped_by_the_scaler(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.scaler.clip_grad_norm_(loop.optimizer, 1e-3)
    loop.step()


def accumulated(loop, number):
    loop.backward()
    if number % 4 == 0:
        loop.step()
        loop.optimizer.zero_grad()


def accumulated_into_zeros(loop, number):
    loop.backward()
    if number % 4 == 0:
        loop.step()
        loop.optimizer.zero_grad(set_to_none=False)


def evaluated_between(loop, number):
    plain(loop, number)
    with torch.no_grad():
        loop.scaler.scale(loop.loss())


def logged_by_hooks(loop, number):
    hook_all(loop, lambda grad: None)
    plain(loop, number)


def clamped_by_hooks_in_proportion_to_the_scale(loop, number):
    bound = 0.5 * loop.scaler.get_scale()
    hook_all(loop, lambda grad: grad.clamp(-bound, bound))
    plain(loop, number)


def centred_while_scaled(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    for param in loop.params:
        param.grad.sub_(param.grad.mean())
    loop.step()


def averaged_over_micro_batches(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.backward()
    for param in loop.params:
        param.grad.div_(2.0)
    loop.step()


def replaced_by_sums_with_noise(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    for param in loop.params:
        param.grad = param.grad + torch.randn_like(param)
    loop.step()


def stepped_by_hand_where_finite(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    norm = nn.utils.clip_grad_norm_(loop.params, 1.0)
    if norm.isfinite():
        loop.optimizer.step()
    loop.scaler.update()


def warmed_up_without_scaling(loop, number):
    if number > 10:
        plain(loop, number)
    else:
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.optimizer.step()


def scaled_by_scales_of_their_own(loop, number):
    loop.optimizer.zero_grad()
    for name in ("task", "penalty"):
        with loop.scaler.loss(loop.loss(), id=name) as scaled:
            scaled.backward()
    loop.step()


def with_a_penalty_in_float32(loop, number):
    loop.optimizer.zero_grad()
    loop.scaler.scale(0.01 * loop.model[0].weight.square().sum()).backward()
    loop.backward()
    loop.step()


def regularised_by_a_gradient(loop, number):
    x = torch.randn(4, 4, requires_grad=True)
    value = loop.model(x).sum()
    (grad,) = torch.autograd.grad(loop.scaler.scale(value), x, create_graph=True)
    penalty = (grad / loop.scaler.get_scale()).square().mean()
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss() + penalty).backward()
    loop.step()


def moved_to_the_sharpest_weights(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    with torch.no_grad():
        moves = [1e-3 * param.grad / param.grad.norm() for param in loop.params]
        torch._foreach_add_(loop.params, moves)
    loop.optimizer.zero_grad()
    loop.backward()
    with torch.no_grad():
        torch._foreach_sub_(loop.params, moves)
    loop.step()


def combined_from_two_losses(loop, number):
    grads = []
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.backward()
        grads.append([param.grad for param in loop.params])
    for param, one, other in zip(loop.params, *grads, strict=True):
        param.grad = one + other
    loop.step()


def divided_by_a_number_that_is_the_scale(loop, number):
    loop.optimizer.zero_grad()
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    torch._foreach_div_([p.grad for p in loop.params], 1024.0)
    loop.step()


def scaled_by_a_method_each(loop, number):
    loop.optimizer.zero_grad()
    if number % 2:
        loop.backward()
    else:
        with loop.scaler.loss(loop.loss(), id="other") as scaled:
            scaled.backward()
    loop.step()


def with_a_frozen_inference_parameter(loop, number):
    if number == 1:
        with torch.inference_mode():
            frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        loop.optimizer.add_param_group({"params": [frozen]})
    moved_to_the_sharpest_weights(loop, number)


def handed_on_by_hand(loop, number):
    first, last = loop.model[:2], loop.model[2:]
    loop.optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        sent = first(torch.randn(4, 4))
        received = sent.detach().requires_grad_()
        loss = last(received).float().square().mean()
    loop.scaler.scale(loss).backward()
    sent.backward(received.grad)
    loop.step()


def handed_on_by_a_product(loop, number):
    first, last = loop.model[:2], loop.model[2:]
    x = torch.randn(4, 4)
    with torch.no_grad():
        cached = first(x)
    cached.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss = last(cached).float().square().mean()
    loop.optimizer.zero_grad()
    loop.scaler.scale(loss).backward()
    with torch.autocast("cpu", torch.float16):
        again = first(x)
    (again * cached.grad).sum().backward()
    loop.step()


HEALTHY = {
    made.__name__: repeated(made)
    for made in (
        *(plain, cleared_to_0, cleared_after_the_step, clipped_after_unscaling),
        *(clipped_by_the_scaler, accumulated, accumulated_into_zeros),
        *(evaluated_between, averaged_over_micro_batches, logged_by_hooks),
        *(clamped_by_hooks_in_proportion_to_the_scale, centred_while_scaled),
        *(replaced_by_sums_with_noise, stepped_by_hand_where_finite),
        *(warmed_up_without_scaling, scaled_by_scales_of_their_own),
        *(with_a_penalty_in_float32, regularised_by_a_gradient),
        *(moved_to_the_sharpest_weights, combined_from_two_losses),
        *(handed_on_by_hand, handed_on_by_a_product),
        *(divided_by_a_number_that_is_the_scale, scaled_by_a_method_each),
        with_a_frozen_inference_parameter,
    )
}


@pytest.mark.parametrize("run", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_loop_is_left_alone(tmp_path, run):
    assert run(tmp_path / "run.gs") == set()


def test_a_scaler_that_only_multiplies_the_loss_is_left_alone(tmp_path, caplog):
    loop = Loop(tmp_path / "run.gs")
    for number in range(1, UPDATES + 1):
        scale = loop.scaler.get_scale()
        scaled = loop.scaler.scale(loop.loss())
        grads = torch.autograd.grad(scaled, loop.params)
        for param, grad in zip(loop.params, grads, strict=True):
            param.grad = grad / scale
        loop.optimizer.step()
        if number % 10 == 0:
            loop.scaler.update(2.0 * scale)
    loop.scaler.close()
    assert caplog.records == []


@pytest.mark.parametrize("updates", [1, 2], ids=["one update", "two updates"])
def test_two_networks_with_an_optimizer_each_are_left_alone(tmp_path, updates):
    loop = Loop(tmp_path / "run.gs")
    critic = nn.Linear(1, 1)
    theirs = torch.optim.SGD(critic.parameters(), lr=0.01)

    def judged(detach):
        made = loop.model(torch.randn(4, 4))
        with torch.autocast("cpu", torch.float16):
            return critic(made.detach() if detach else made).float().mean()

    for _ in range(UPDATES // 2):
        theirs.zero_grad()
        loop.scaler.scale(judged(detach=True)).backward()
        loop.scaler.step(theirs)
        if updates == 2:
            loop.scaler.update()
        loop.optimizer.zero_grad()
        # Adds to the gradients of the critic as well, which are cleared next.
        loop.scaler.scale(judged(detach=False)).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    assert loop.causes() == set()


# --- What the check may cost ----------------------------------------------------------


def test_the_first_updates_and_every_64th_are_sampled():
    scaler, param = GradScaler("cpu"), parameter(1)
    optimizer = torch.optim.SGD([param], lr=0.1)
    sampled = []
    for number in range(1, 2 * EVERY + 2):
        if scaler._monitor.loop.due:
            sampled.append(number)
        iterate(scaler, optimizer, param, 1.0)
    assert sampled == [*range(1, 9), 21, 34, EVERY, 2 * EVERY]


def test_between_sampled_updates_no_backward_pass_is_hooked():
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = torch.optim.SGD([param], lr=0.1)
    hooked, loop = [], scaler._monitor.loop
    scaled = loop.scaled
    loop.scaled = lambda *given: hooked.append(given) or scaled(*given)
    for _ in range(30):
        iterate(scaler, optimizer, param, 1.0)
    assert len(hooked) == 9


def test_nothing_of_a_run_is_kept_alive(tmp_path):
    loop = Loop(tmp_path / "run.gs")
    for number in range(1, 8):
        plain(loop, number)
    gone = [weakref.ref(each) for each in (loop.model, loop.optimizer, loop.params[0])]
    gone.append(weakref.ref(loop.params[0].grad))
    scaler = loop.scaler
    del loop
    gc.collect()
    # The model was given to the scaler, which names its parameters with it.
    scaler.close()
    del scaler
    gc.collect()
    assert [each() for each in gone] == [None] * 4


def test_gradients_are_not_kept_alive_by_a_scaler_in_use():
    scaler, param = GradScaler("cpu"), parameter(3)
    optimizer = torch.optim.SGD([param], lr=0.1)
    for _ in range(5):
        iterate(scaler, optimizer, param, 1.0)
    gone = weakref.ref(param.grad)
    optimizer.zero_grad()
    gc.collect()
    assert gone() is None


@pytest.fixture
def no_other_checks(monkeypatch):
    """Scalers of tests before this one may be alive."""
    monkeypatch.setattr(loop_check, "step_hook", StepHook())


@pytest.mark.usefixtures("no_other_checks")
def test_a_closed_scaler_watches_no_optimizer(tmp_path):
    before = len(_global_optimizer_pre_hooks)
    loop = Loop(tmp_path / "run.gs")
    assert len(_global_optimizer_pre_hooks) == before + 1
    loop.scaler.close()
    assert len(_global_optimizer_pre_hooks) == before


@pytest.mark.usefixtures("no_other_checks")
def test_without_a_run_file_no_optimizer_is_watched():
    before = len(_global_optimizer_pre_hooks)
    scaler = GradScaler("cpu")
    assert len(_global_optimizer_pre_hooks) == before
    scaler.close()


# --- Other threads --------------------------------------------------------------------


class Guarded(nn.Parameter):
    """A parameter that notes the threads in which its gradient is read."""

    readers: set[int]

    @property
    def grad(self):
        self.readers.add(threading.get_ident())
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)


def test_gradients_of_an_optimizer_of_another_thread_are_not_read(tmp_path):
    loop, param = Loop(tmp_path / "run.gs"), Guarded(torch.ones(1))
    param.readers = set()
    other = torch.optim.SGD([param], lr=0.1)

    def train():
        param.square().sum().backward()
        other.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    param.readers.clear()
    for number in range(1, 8):
        plain(loop, number)
    assert param.readers == set()
    # As before, in the thread of the scaler.
    train()
    plain(loop, 8)
    assert param.readers == {threading.get_ident()}
    loop.scaler.close()


@pytest.mark.usefixtures("no_other_checks")
def test_a_scaler_that_is_made_during_a_step_adds_no_hook(tmp_path):
    made = []
    handle = register_optimizer_step_pre_hook(
        lambda *_: made.append(Loop(tmp_path / "second.gs"))
    )
    first = Loop(tmp_path / "first.gs")
    hooks = len(_global_optimizer_pre_hooks)
    # Torch iterates over the hooks here, and would raise.
    first.optimizer.step()
    assert len(_global_optimizer_pre_hooks) == hooks
    first.scaler.close()
    assert len(_global_optimizer_pre_hooks) == hooks
    made.pop().scaler.close()
    assert len(_global_optimizer_pre_hooks) == hooks - 1
    handle.remove()


def test_a_compiled_step_of_an_optimizer_is_compiled_beside_a_recorded_run(tmp_path):
    loop = Loop(tmp_path / "run.gs")
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.5)
    param.grad = torch.ones(2)
    torch.compile(optimizer.step, backend="eager")()
    assert param.tolist() == [0.5, 0.5]
    loop.scaler.close()


# --- The dtype of a graph -------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (None, "float32")],
)
def test_the_half_precision_of_a_graph_is_found_below_a_float32_loss(dtype, name):
    layer = nn.Linear(2, 1)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = layer(torch.ones(1, 2)).float().sum()
    assert half_dtype(loss) == name


def test_the_dtype_inside_a_function_of_the_user_is_not_known():
    assert half_dtype(planted(parameter(2), 1.0)) is None


def test_two_scalers_with_both_backward_passes_before_both_steps_are_no_direct_step(
    tmp_path,
):
    loops = [Loop(tmp_path / f"{name}.gs") for name in "ab"]
    for _ in range(UPDATES):
        for loop in loops:
            loop.optimizer.zero_grad()
        for loop in loops:
            loop.backward()
        for loop in loops:
            loop.scaler.step(loop.optimizer)
        for loop in loops:
            loop.scaler.update()
    assert [loop.causes() for loop in loops] == [set(), set()]
