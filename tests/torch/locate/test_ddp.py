"""A model inside DistributedDataParallel is replayed without any collective."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradscale.torch.locate.diagnose import diagnose
from tests.torch.locate.nets import loss_of, poisoned


@pytest.fixture
def group():
    """A group of one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def called(state=None, bucket=None):
    raise AssertionError("a collective was called")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_layer_is_named_and_no_collective_is_called(group, direction, monkeypatch):
    net = poisoned(1, direction, depth=2)
    net.register_buffer("seen", torch.zeros(()))
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(None, called)
    monkeypatch.setattr(wrapped, "_sync_buffers", called)
    before = wrapped.require_forward_param_sync
    found = diagnose(wrapped, lambda: loss_of(wrapped), 1024.0)
    assert (found.module, found.direction) == ("module.layers.1", direction)
    assert wrapped.require_forward_param_sync == before
    assert "forward" not in wrapped.__dict__


def test_the_stand_in_for_collectives_is_called_in_an_ordinary_iteration(group):
    wrapped = DistributedDataParallel(nn.Linear(1, 1))
    seen = []

    def noted(state, bucket):
        seen.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, noted)
    diagnose(wrapped, lambda: wrapped(torch.ones(1, 1)).sum(), 1.0)
    assert seen == []
    wrapped(torch.ones(1, 1)).sum().backward()
    assert seen == [0]
