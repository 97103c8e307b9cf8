"""The armed hooks: what they find, and that nothing stays when they are off."""

import gc
import weakref

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.checkpoint import checkpoint

from gradscale.torch.locate.module_hooks import Armed
from gradscale.torch.locate.result import order_of_backward
from tests.torch.locate.nets import loss_of, poisoned


def watched(model, loss_of_model, scale=1.0, armed=None):
    """Run one iteration under hooks and return what they found."""
    armed = Armed() if armed is None else armed
    armed.arm(model)
    try:
        loss = loss_of_model()
        scaled = loss * scale
        armed.watch_loss(scaled, loss)
        scaled.backward()
        return armed.finding(scale)
    finally:
        armed.disarm()


def hooks():
    tables = (modules._global_forward_hooks, modules._global_forward_pre_hooks)
    return sum(map(len, tables)) + len(modules._global_forward_hooks_always_called)


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


# --- findings -------------------------------------------------------------------------


def test_a_function_between_modules_belongs_to_the_one_that_called_it():
    model = Between(lambda x: x.abs() * 300.0 * 65504.0 + 65504.0)
    found = watched(model, lambda: model(half_ones()).float().sum())
    assert (found.module, found.direction) == ("", "forward")
    assert found.context == "between its modules, before last (Linear)"


def test_an_output_that_is_written_to_afterwards_is_looked_at_again():
    model = Between(lambda x: x.add_(65504.0).add_(65504.0))
    found = watched(model, lambda: model(half_ones()).float().sum())
    assert (found.module, found.direction) == ("", "forward")
    assert found.context == "between its modules, before last (Linear)"


def test_a_batch_that_is_not_finite_is_an_input():
    model = Between(lambda x: x)
    found = watched(model, lambda: model(half_ones() / 0.0).float().sum())
    assert (found.module, found.tensor, found.count) == ("", "input", 4)


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


def test_a_loss_that_is_lost_after_the_last_module_is_told():
    model = Between(lambda x: x)
    found = watched(model, lambda: (model(half_ones()) * 0.0).log().float().sum())
    assert (found.module, found.tensor, found.loss_finite) == (None, "loss", False)


def test_a_loss_that_only_the_scale_makes_infinite_is_told():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    found = watched(model, lambda: model(torch.full((1, 1), 1e30)).sum(), 2.0**40)
    assert (found.tensor, found.loss_finite) == ("scaled loss", True)


def test_a_checkpointed_layer_is_named():
    net = poisoned(1, "backward", depth=3)

    def loss():
        x = torch.ones(1, 4).half().requires_grad_()
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return net.head(x).float().sum()

    found = watched(net, loss, 1024.0)
    assert (found.module, found.direction) == ("layers.1", "backward")


def test_several_backward_passes_of_one_iteration_are_seen():
    net = poisoned(1, "backward", depth=2)
    armed = Armed()
    armed.arm(net)
    try:
        for scale in (2.0**-20, 1024.0):
            scaled = loss_of(net) * scale
            armed.watch_loss(scaled)
            scaled.backward()
        assert armed.finding(1024.0).module == "layers.1"
    finally:
        armed.disarm()


def test_the_order_of_backward_is_recorded():
    model = Between(lambda x: x)
    armed = Armed()
    watched(model, lambda: model(half_ones()).float().sum(), armed=armed)
    assert armed.order[:2] == ["last.bias", "last.weight"]
    assert set(armed.order[2:]) == {"first.bias", "first.weight"}


def test_a_recorded_order_is_used_and_said():
    names = ["a", "b", "c"]
    assert order_of_backward(names, ["b", "c"]) == (["b", "c", "a"], "recorded")


# --- on and off -----------------------------------------------------------------------


def test_a_finding_leaves_gradients_as_they_would_be():
    net, twin = poisoned(None, None, depth=2), poisoned(None, None, depth=2)
    watched(net, lambda: loss_of(net), 8.0)
    (loss_of(twin) * 8.0).backward()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_three_good_steps_disarm():
    armed = Armed()
    armed.arm(nn.Linear(1, 1))
    armed.well()
    armed.well()
    assert armed.armed
    armed.well()
    assert not armed.armed


def test_a_failure_starts_the_count_of_good_steps_again():
    armed, model = Armed(), nn.Linear(1, 1)
    armed.arm(model)
    armed.well()
    armed.well()
    armed.arm(model)
    armed.well()
    assert armed.armed
    armed.disarm()


def test_a_good_step_forgets_what_was_seen():
    net = poisoned(1, "backward", depth=2)
    armed = Armed()
    armed.arm(net)
    try:
        scaled = loss_of(net) * 1024.0
        armed.watch_loss(scaled)
        scaled.backward()
        armed.well()
        assert not armed.finding(1.0).found
    finally:
        armed.disarm()


def test_no_hook_stays_when_it_is_disarmed():
    before = hooks()
    armed, net = Armed(), poisoned(None, None, depth=1)
    armed.arm(net)
    assert hooks() > before
    armed.disarm()
    assert hooks() == before
    assert all(not m._forward_hooks for m in net.modules())


def test_arming_twice_adds_no_second_set_of_hooks():
    armed, net = Armed(), nn.Linear(1, 1)
    armed.arm(net)
    once = hooks()
    armed.arm(net)
    assert hooks() == once
    armed.disarm()


def test_a_graph_that_is_kept_is_not_watched_any_more():
    armed, net = Armed(), poisoned(None, None, depth=1)
    armed.arm(net)
    loss = loss_of(net)
    armed.watch_loss(loss)
    armed.disarm()
    loss.backward()
    assert not armed.finding(1.0).found
    assert armed.order == []


def test_nothing_of_the_model_or_its_graph_is_held_when_it_is_disarmed():
    armed, net = Armed(), poisoned(None, None, depth=1)
    armed.arm(net)
    loss = loss_of(net)
    armed.watch_loss(loss)
    armed.disarm()
    dead = [weakref.ref(net), weakref.ref(loss)]
    del net, loss
    gc.collect()
    assert [each() for each in dead] == [None, None]


def test_no_activation_is_held_while_it_is_armed():
    armed, net = Armed(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outputs = []
    handle = net[0].register_forward_hook(
        lambda module, inputs, output: outputs.append(weakref.ref(output))
    )
    armed.arm(net)
    try:
        with torch.no_grad():
            net(torch.ones(1, 2))
        gc.collect()
        assert outputs[0]() is None
    finally:
        armed.disarm()
        handle.remove()


def test_watching_a_loss_while_disarmed_does_nothing():
    weight = torch.ones(1, requires_grad=True)
    armed, loss = Armed(), weight * 2.0
    armed.watch_loss(loss)
    loss.backward()
    assert armed.order == []


def test_a_compiled_model_is_left_alone():
    before = hooks()
    armed, model = Armed(), nn.Linear(1, 1)
    assert not armed.arm(torch.compile(model, backend="eager"))
    assert hooks() == before
