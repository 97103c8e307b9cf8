"""Module hooks locate non-finite values and leave nothing behind when disabled."""

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscale.torch.locate import module_hooks
from gradscale.torch.locate.module_hooks import ModuleHooks
from gradscale.torch.locate.result import order_of_backward
from tests.torch.locate.nets import loss_of, poisoned


def watched(model, loss_of_model, scale=1.0, hooks=None):
    """Run one iteration with hooks enabled and return the location."""
    hooks = ModuleHooks() if hooks is None else hooks
    hooks.enable(model)
    try:
        loss = loss_of_model()
        scaled = loss * scale
        hooks.watch_loss(scaled, loss)
        scaled.backward()
        return hooks.locate(scale)
    finally:
        hooks.disable()


def registered(model):
    """Return the number of forward hooks on the modules of a model."""
    return sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + len(module._forward_hooks_always_called)
        for module in model.modules()
    )


class Between(nn.Module):
    """An overflow in a function between two modules."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2).half(), nn.Linear(2, 2).half()
        self.between = between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def half_ones():
    return torch.ones(2, 2).half()


# --- locations ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "direction", "module"), [(1e6, "forward", "0"), (1.0, "", None)]
)
def test_a_batch_beyond_float16_is_found_behind_a_function_that_saturates(
    size, direction, module
):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    # Of one sign: infinity minus infinity would be NaN.
    nn.init.constant_(model[0].weight, 0.5)

    def loss():
        with torch.autocast("cpu", torch.float16):
            return model(size * torch.ones(2, 2)).float().square().mean()

    location = watched(model, loss)
    assert (location.direction, location.module) == (direction, module)
    assert location.loss_finite
    assert location.given_peak == (size if location.found else 0.0)


def test_an_input_that_another_module_has_computed_is_not_of_the_batch():
    first, model = nn.Linear(2, 2), nn.Linear(2, 1)

    def loss():
        return model(first(torch.ones(1, 2)) * torch.nan).sum()

    location = watched(model, loss)
    assert (location.tensor, location.given) == ("input", False)


def test_a_function_between_modules_belongs_to_the_one_that_called_it():
    model = Between(lambda x: x.abs() * 300.0 * 65504.0 + 65504.0)
    found = watched(model, lambda: model(half_ones()).float().sum())
    assert (found.module, found.direction) == ("", "forward")
    assert found.context == "between its modules, before last (Linear)"


def test_an_output_that_is_written_to_afterwards_is_measured_again():
    model = Between(lambda x: x.add_(65504.0).add_(65504.0))
    found = watched(model, lambda: model(half_ones()).float().sum())
    assert (found.module, found.direction) == ("", "forward")
    assert found.context == "between its modules, before last (Linear)"


def test_the_largest_finite_input_of_a_spoilt_batch_is_its_own():
    model, batch = Between(lambda x: x), half_ones() * 3.0
    batch[0, 0] = torch.nan
    found = watched(model, lambda: model(batch).float().sum())
    assert (found.tensor, found.peak) == ("input", 3.0)
    assert "largest finite input of the operation 3" in found.before


def test_a_batch_without_a_finite_element_has_no_largest_one():
    model = Between(lambda x: x)
    found = watched(model, lambda: model(half_ones() * torch.nan).float().sum())
    assert (found.tensor, found.before) == ("input", "")


def test_a_batch_that_is_not_finite_is_an_input():
    model = Between(lambda x: x)
    found = watched(model, lambda: model(half_ones() / 0.0).float().sum())
    assert (found.module, found.tensor, found.count) == ("", "input", 4)


@pytest.mark.parametrize("masks", [0, 1])
def test_a_negative_infinity_without_other_inputs_is_no_mask(masks):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, *inputs):
            return self.linear(inputs[0]) + sum(inputs)

    batch = torch.ones(2, 2)
    batch[0, 0] = -math.inf
    # Infinity minus infinity in the sum.
    inputs = (torch.ones(2, 2), batch, batch.neg().neg()) if masks else (batch,)
    model = Model()
    found = watched(model, lambda: (model(*inputs) * torch.nan).sum())
    assert found.given is (masks == 0)


@pytest.mark.parametrize(
    ("value", "direction"),
    [(math.inf, "forward"), (math.nan, "forward"), (-math.inf, "")],
)
def test_a_batch_that_a_finite_loss_hides_is_an_input_unless_it_is_a_mask(
    value, direction
):
    model, batch = nn.Sequential(nn.Sigmoid(), nn.Linear(2, 1)), torch.ones(2, 2)
    batch[0, 0] = value
    found = watched(model, lambda: model(batch).nan_to_num().sum())
    assert (found.direction, found.loss_finite) == (direction, True)
    assert found.given is (direction == "forward")


def with_targets(targets, loss_of_difference, model=None):
    """Return the location for a loss of the difference from some targets."""
    model = nn.Linear(2, 3) if model is None else model
    x = torch.ones(2, 2)
    return watched(model, lambda: loss_of_difference(model(x).float() - targets))


def test_a_nan_of_a_difference_is_one_of_the_target():
    targets = torch.zeros(2, 3)
    targets[0, 1] = math.nan
    seen = with_targets(targets, lambda difference: difference.square().mean())
    assert (seen.direction, seen.tensor, seen.count) == ("forward", "target", 1)


def test_a_target_that_is_masked_after_its_loss_is_named_for_the_nan_gradients():
    targets = torch.zeros(2, 3)
    targets[0, 1] = math.nan

    def masked(difference):
        squares = difference.square()
        return squares[~squares.isnan()].mean()

    seen = with_targets(targets, masked)
    assert (seen.direction, seen.tensor, seen.loss_finite) == (
        "forward",
        "target",
        True,
    )


def test_an_overflow_of_a_difference_is_not_of_the_target():
    seen = with_targets(
        torch.full((2, 3), -3e38), lambda difference: (difference * 4).square().mean()
    )
    assert seen.tensor == "loss"


def test_a_nan_that_is_computed_after_the_last_module_is_not_of_the_target():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, -1.0)
    x, targets = torch.ones(2, 2), torch.zeros(2, 1)

    def loss():
        return (model(x).log() - targets).square().mean()

    assert watched(model, loss).tensor == "loss"


@pytest.mark.parametrize(("training", "found"), [(True, "output"), (False, "loss")])
def test_statistics_of_a_norm_are_not_targets(training, found):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).train(training)
    model[1].eval().running_var.fill_(math.nan)
    seen = watched(model, lambda: model(torch.ones(2, 2)).relu().mean())
    # The forward pass of a model in evaluation mode is not observed.
    assert seen.tensor == found


def test_a_softmax_of_masked_rows_is_named_not_the_mask():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.softmax = nn.Linear(2, 2), nn.Softmax(-1)

        def forward(self, x):
            return self.softmax(self.scores(x).masked_fill(x > 0, float("-inf")))

    model = Masked()
    found = watched(model, lambda: model(torch.ones(1, 2)).sum())
    assert (found.module, found.tensor, found.kind) == ("softmax", "output", "nan")


def test_the_operation_of_a_gradient_is_named_with_its_count():
    model = Between(lambda x: (x - x).sqrt())
    found = watched(model, lambda: model(half_ones()).float().sum())
    assert (found.operation, found.direction, found.module) == ("sqrt", "backward", "")
    assert (found.count, found.elements) == (4, 4)


def test_the_first_operation_of_a_module_belongs_to_it():
    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()

    model = nn.Sequential(nn.Linear(2, 2, bias=False), Root())
    found = watched(model, lambda: model(torch.zeros(1, 2)).sum())
    assert (found.module, found.operation) == ("1", "sqrt")


def test_a_gradient_of_a_weight_is_named_by_the_weight():
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.constant_(model.weight, 2.0**-10)
    x = torch.full((1, 1), 2.0**14).half()
    found = watched(model, lambda: model(x).float().sum(), 4.0)
    assert (found.tensor, found.peak) == ("gradient of weight", 4.0)


def test_gradients_that_overflow_only_in_their_sum_are_named():
    model = Between(lambda x: x + x)
    for layer in (model.first, model.last):
        nn.init.constant_(layer.weight, 1.0)
    x = torch.full((1, 2), 2.0**-10).half()
    found = watched(model, lambda: model(x).float().sum(), 2.0**14)
    assert (found.module, found.tensor) == ("first", "grad_output")


@pytest.mark.parametrize("count", [0, 1])
def test_a_division_by_a_count_of_0_is_named(count):
    model = nn.Linear(2, 3)
    counts = torch.tensor([2, count, 1])

    def loss():
        each = model(torch.zeros(4, 2)).square().sum(0)[:3] * torch.tensor([1.0, 0, 1])
        mean = each / counts
        # No target, although no graph has computed it.
        return (torch.softmax(mean.detach(), 0) * mean).sum()

    found = watched(model, loss)
    assert found.found is (count == 0)
    if found.found:
        assert (
            found.where == "forward, outside any module, div, 1 / divisor: 1 of 3 inf"
        )
        assert found.pattern.name == "division_by_zero"


def test_a_loss_that_is_nan_outside_any_module_is_located_there():
    model = Between(lambda x: x)
    found = watched(model, lambda: (model(half_ones()) * 0.0).log().float().sum())
    assert (found.module, found.tensor, found.loss_finite) == (None, "loss", False)
    assert found.where == "the loss itself, outside any module: 1 of 1 inf"


def test_a_loss_that_overflows_only_when_scaled_is_finite_before_scaling():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    found = watched(model, lambda: model(torch.full((1, 1), 1e30)).sum(), 2.0**40)
    assert (found.tensor, found.loss_finite) == ("scaled loss", True)
    assert found.where == "the scaled loss, outside any module: 1 of 1 inf"


def test_a_checkpointed_layer_is_named():
    net = poisoned(1, "backward", depth=3)

    def loss():
        x = torch.ones(1, 4).half().requires_grad_()
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return net.head(x).float().sum()

    found = watched(net, loss, 1024.0)
    assert (found.module, found.direction) == ("layers.1", "backward")


def test_several_backward_passes_of_one_iteration_are_observed():
    net = poisoned(1, "backward", depth=2)
    hooks = ModuleHooks()
    hooks.enable(net)
    try:
        for scale in (2.0**-20, 1024.0):
            scaled = loss_of(net) * scale
            hooks.watch_loss(scaled)
            scaled.backward()
        assert hooks.locate(1024.0).module == "layers.1"
    finally:
        hooks.disable()


def test_the_order_of_backward_is_recorded():
    model = Between(lambda x: x)
    hooks = ModuleHooks()
    watched(model, lambda: model(half_ones()).float().sum(), hooks=hooks)
    assert hooks.backward_order[:2] == ["last.bias", "last.weight"]
    assert set(hooks.backward_order[2:]) == {"first.bias", "first.weight"}


def test_a_recorded_order_is_used():
    names = ["a", "b", "c"]
    assert order_of_backward(names, ["b", "c"]) == (["b", "c", "a"], "recorded")


# --- on and off -----------------------------------------------------------------------


def test_gradients_are_the_same_as_without_hooks():
    net, twin = poisoned(None, None, depth=2), poisoned(None, None, depth=2)
    watched(net, lambda: loss_of(net), 8.0)
    (loss_of(twin) * 8.0).backward()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_three_finite_steps_disable_the_hooks():
    hooks = ModuleHooks()
    hooks.enable(nn.Linear(1, 1))
    hooks.finite_step()
    hooks.finite_step()
    assert hooks.enabled
    hooks.finite_step()
    assert not hooks.enabled


def test_a_failure_restarts_the_count_of_finite_steps():
    hooks, model = ModuleHooks(), nn.Linear(1, 1)
    hooks.enable(model)
    hooks.finite_step()
    hooks.finite_step()
    hooks.enable(model)
    hooks.finite_step()
    assert hooks.enabled
    hooks.disable()


def test_a_finite_step_drops_its_observations():
    net = poisoned(1, "backward", depth=2)
    hooks = ModuleHooks()
    hooks.enable(net)
    try:
        scaled = loss_of(net) * 1024.0
        hooks.watch_loss(scaled)
        scaled.backward()
        hooks.finite_step()
        assert not hooks.locate(1.0).found
    finally:
        hooks.disable()


def test_no_hook_stays_when_disabled():
    hooks, net = ModuleHooks(), poisoned(None, None, depth=1)
    hooks.enable(net)
    assert registered(net) > 0
    hooks.disable()
    assert registered(net) == 0


def test_other_models_and_modules_as_such_have_no_hooks():
    hooks, net, other = ModuleHooks(), nn.Linear(1, 1), nn.Linear(1, 1)
    hooks.enable(net)
    assert registered(other) == 0
    assert not nn.modules.module._has_any_global_hook()
    hooks.disable()


def test_enabling_twice_adds_no_second_set_of_hooks():
    hooks, net = ModuleHooks(), nn.Linear(1, 1)
    hooks.enable(net)
    once = registered(net)
    hooks.enable(net)
    assert registered(net) == once
    hooks.disable()


def test_a_graph_that_the_user_keeps_has_no_hooks_when_disabled():
    hooks, net = ModuleHooks(), poisoned(None, None, depth=1)
    hooks.enable(net)
    loss = loss_of(net)
    hooks.watch_loss(loss)
    hooks.disable()
    loss.backward()
    assert not hooks.locate(1.0).found
    assert hooks.backward_order == []


def test_no_reference_to_the_model_or_its_graph_stays_when_disabled():
    hooks, net = ModuleHooks(), poisoned(None, None, depth=1)
    hooks.enable(net)
    loss = loss_of(net)
    hooks.watch_loss(loss)
    hooks.disable()
    dead = [weakref.ref(net), weakref.ref(loss)]
    del net, loss
    gc.collect()
    assert [each() for each in dead] == [None, None]


def test_no_activation_is_kept_alive_while_enabled():
    hooks, net = ModuleHooks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outputs = []
    handle = net[0].register_forward_hook(
        lambda module, inputs, output: outputs.append(weakref.ref(output))
    )
    hooks.enable(net)
    try:
        net(torch.ones(1, 2))
        gc.collect()
        assert hooks._observations
        assert outputs[0]() is None
    finally:
        hooks.disable()
        handle.remove()


def test_watching_a_loss_while_disabled_does_nothing():
    weight = torch.ones(1, requires_grad=True)
    hooks, loss = ModuleHooks(), weight * 2.0
    hooks.watch_loss(loss)
    loss.backward()
    assert hooks.backward_order == []


def test_a_compiled_model_is_left_alone():
    hooks, model = ModuleHooks(), nn.Linear(1, 1)
    assert not hooks.enable(torch.compile(model, backend="eager"))
    assert registered(model) == 0


def test_a_model_that_is_enabled_is_not_kept_alive():
    hooks, net = ModuleHooks(), nn.Linear(1, 1)
    hooks.enable(net)
    dead = weakref.ref(net)
    del net
    assert dead() is None
    hooks.disable()


# --- evaluation -----------------------------------------------------------------------


def held(hooks):
    """Return the tensors that the hooks hold, and the observations."""
    gc.collect()
    tensors = [each for stats in hooks._stats.values() for each in stats]
    tensors = [each for each in tensors if isinstance(each, Tensor)]
    return tensors + hooks._observations + hooks._modules._starts


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_keeps_no_tensors(context, training):
    hooks, net = ModuleHooks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hooks.enable(net)
    net.train(training)
    with context():
        for _ in range(10):
            net(torch.ones(1, 2))
    # A mark of the place where the pass began.
    assert len(held(hooks)) <= 1
    hooks.disable()


def test_an_evaluation_with_gradients_keeps_no_tensors():
    hooks, net = ModuleHooks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hooks.enable(net)
    net.eval()
    for _ in range(10):
        net(torch.ones(1, 2))
    assert held(hooks) == []
    hooks.disable()


def test_an_evaluation_removes_the_hooks_until_the_next_step():
    hooks, net = ModuleHooks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hooks.enable(net)
    once = registered(net)
    net.eval()(torch.ones(1, 2))
    assert registered(net) == 0
    net.train()
    hooks.finite_step()
    assert hooks.enabled
    assert registered(net) == once
    hooks.disable()


def test_an_evaluation_in_training_mode_keeps_a_limited_number_of_tensors(monkeypatch):
    monkeypatch.setattr(module_hooks, "MAX_OBSERVATIONS", 20)
    hooks, net = ModuleHooks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hooks.enable(net)
    for _ in range(100):
        hooks.watch_loss(net(torch.ones(1, 2)).sum())
    assert len(hooks._observations) < 250
    assert len(hooks._nodes) <= 20
    hooks.disable()


# --- failures inside the hooks --------------------------------------------------------


def broken(monkeypatch):
    def fail(tensor):
        raise LookupError(f"no statistics of {tuple(tensor.shape)}")

    monkeypatch.setattr(module_hooks, "device_stats_of", fail)


def test_a_failure_in_forward_removes_the_hooks_for_good(monkeypatch):
    hooks, net = ModuleHooks(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hooks.enable(net)
    broken(monkeypatch)
    loss = net(torch.ones(1, 2)).sum()
    assert hooks.failure == "LookupError: no statistics of (1, 2)"
    assert registered(net) == 0
    hooks.watch_loss(loss)
    loss.backward()
    assert not hooks.locate(1.0).found
    hooks.disable()
    assert not hooks.enable(net)


def test_a_failure_in_backward_does_not_reach_the_run(monkeypatch):
    hooks, net = ModuleHooks(), nn.Linear(2, 2)
    hooks.enable(net)
    loss = net(torch.ones(1, 2)).sum()
    hooks.watch_loss(loss)
    assert hooks.failure is None
    broken(monkeypatch)
    loss.backward()
    assert hooks.failure == "LookupError: no statistics of (1, 2)"
    assert net.weight.grad is not None
    hooks.disable()


def test_a_model_that_cannot_be_walked_is_a_failure():
    class Walled(nn.Module):
        def named_modules(self, *args, **kwargs):
            raise LookupError("no modules")

    hooks = ModuleHooks()
    assert not hooks.enable(Walled())
    assert hooks.failure == "LookupError: no modules"
