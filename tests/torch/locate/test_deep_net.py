"""One poisoned layer of 24 is named, forward and backward, by both instruments."""

import pytest

from gradscale.torch.locate.diagnose import diagnose
from gradscale.torch.locate.module_hooks import Armed
from tests.torch.locate.nets import DEPTH, loss_of, poisoned

LAYERS = range(DEPTH)
DIRECTIONS = ["forward", "backward"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_replay_names_the_poisoned_layer(layer, direction):
    net = poisoned(layer, direction)
    found = diagnose(net, lambda: loss_of(net), 1024.0)
    assert (found.module, found.direction) == (f"layers.{layer}", direction)
    assert found.kind == "inf"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_armed_hooks_alone_name_the_poisoned_layer(layer, direction):
    net = poisoned(layer, direction)
    armed = Armed()
    armed.arm(net)
    try:
        loss = loss_of(net)
        scaled = loss * 1024.0
        armed.watch_loss(scaled, loss)
        scaled.backward()
        found = armed.finding(1024.0)
    finally:
        armed.disarm()
    assert (found.module, found.direction) == (f"layers.{layer}", direction)
    assert found.kind == "inf"


def test_the_healthy_twin_is_found_healthy_by_the_replay():
    net = poisoned(None, None)
    assert not diagnose(net, lambda: loss_of(net), 1024.0).found


def test_the_healthy_twin_is_found_healthy_by_the_armed_hooks():
    net = poisoned(None, None)
    armed = Armed()
    armed.arm(net)
    try:
        loss = loss_of(net)
        scaled = loss * 1024.0
        armed.watch_loss(scaled, loss)
        scaled.backward()
        assert not armed.finding(1024.0).found
    finally:
        armed.disarm()
