"""The replay and the hooks name one poisoned layer of 24, in both directions."""

import pytest

from gradscale.torch.locate.diagnose import diagnose
from gradscale.torch.locate.module_hooks import ModuleHooks
from tests.torch.locate.nets import DEPTH, loss_of, poisoned

LAYERS = range(DEPTH)
# The replay runs the step anew: the first and last layers, and two in the middle.
REPLAYED = (0, 1, DEPTH // 2 - 1, DEPTH // 2, DEPTH - 2, DEPTH - 1)
DIRECTIONS = ["forward", "backward"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", REPLAYED)
def test_the_replay_names_the_poisoned_layer(layer, direction):
    net = poisoned(layer, direction)
    found = diagnose(net, lambda: loss_of(net), 1024.0)
    assert (found.module, found.direction) == (f"layers.{layer}", direction)
    assert found.kind == "inf"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_module_hooks_name_the_poisoned_layer(layer, direction):
    net = poisoned(layer, direction)
    hooks = ModuleHooks()
    hooks.enable(net)
    try:
        loss = loss_of(net)
        scaled = loss * 1024.0
        hooks.watch_loss(scaled, loss)
        scaled.backward()
        found = hooks.locate(1024.0)
    finally:
        hooks.disable()
    assert (found.module, found.direction) == (f"layers.{layer}", direction)
    assert found.kind == "inf"


def test_the_healthy_twin_is_finite_for_the_replay():
    net = poisoned(None, None)
    assert not diagnose(net, lambda: loss_of(net), 1024.0).found


def test_the_healthy_twin_is_finite_for_the_module_hooks():
    net = poisoned(None, None)
    hooks = ModuleHooks()
    hooks.enable(net)
    try:
        loss = loss_of(net)
        scaled = loss * 1024.0
        hooks.watch_loss(scaled, loss)
        scaled.backward()
        assert not hooks.locate(1024.0).found
    finally:
        hooks.disable()
