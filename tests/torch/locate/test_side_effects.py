"""A replay leaves the model, its gradients and all random generators unchanged."""

import gc
import random
import weakref
from collections import Counter, deque

import numpy
import pytest
import torch
from torch import nn

from gradscale.torch.locate.diagnose import diagnose
from gradscale.torch.locate.replay_mode import ReplayMode


class Busy(nn.Module):
    """Changes statistics, counters and random generators in forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.linear = nn.Linear(3, 3)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.add_(1.0)
        x = x * random.random() * numpy.random.rand() + torch.rand(())
        return self.linear(self.drop(self.norm(x)))


def prepared():
    torch.manual_seed(0)
    model = Busy()
    model(torch.randn(4, 3)).sum().backward()
    model.linear.bias.grad = None
    model.norm.eval()
    model.norm.register_forward_hook(lambda *_: None)
    return model


def facts(model):
    """Return everything that must not change, with identities and versions."""
    tensors = [*model.parameters(), *model.buffers()]
    grads = [p.grad for p in model.parameters()]
    return {
        "tensors": [(id(t), t._version, t.detach().clone()) for t in tensors],
        "grads": [None if g is None else (id(g), g._version, g.clone()) for g in grads],
        "flags": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) for m in model.modules()],
        "global": len(torch.nn.modules.module._global_forward_hooks)
        + len(torch.nn.modules.module._global_forward_pre_hooks),
        "calls": model.calls,
        "random": random.getstate(),
        "numpy": str(numpy.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def changed(before, after):
    return {name for name in before if not same(before[name], after[name])}


def test_the_comparison_detects_an_ordinary_iteration():
    model = prepared()
    before = facts(model)
    model(torch.randn(4, 3)).sum().backward()
    kinds = {"tensors", "grads", "calls", "random", "numpy", "torch"}
    assert changed(before, facts(model)) == kinds


@pytest.mark.parametrize("scale", [1.0, 2.0**120])
def test_a_replay_changes_nothing(scale):
    model, x = prepared(), torch.randn(4, 3)
    before = facts(model)
    found = diagnose(model, lambda: model(x).pow(2).sum() * 1e9, scale)
    assert found.found == (scale > 1.0)
    assert changed(before, facts(model)) == set()


def test_a_closure_that_raises_changes_nothing():
    model, x = prepared(), torch.randn(4, 3)
    before = facts(model)

    def closure():
        model.eval()
        model(x)
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        diagnose(model, closure, 1.0)
    assert changed(before, facts(model)) == set()


def test_a_closure_that_runs_backward_and_clears_gradients_changes_nothing():
    model, x = prepared(), torch.randn(4, 3)
    before = facts(model)

    def closure():
        model.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        return loss

    diagnose(model, closure, 1.0)
    assert changed(before, facts(model)) == set()


def test_a_closure_that_adds_to_the_gradients_changes_nothing():
    model, x = prepared(), torch.randn(4, 3)
    before = facts(model)

    def closure():
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        return loss

    diagnose(model, closure, 1.0)
    assert changed(before, facts(model)) == set()


def test_a_forward_pass_that_writes_to_a_weight_changes_nothing():
    model, x = prepared(), torch.randn(4, 3)
    before = facts(model)

    def closure():
        with torch.no_grad():
            model.linear.weight.mul_(2.0)
            model.linear.weight.data.add_(1.0)
        return model(x).sum()

    diagnose(model, closure, 1.0)
    assert changed(before, facts(model)) == set()


def test_a_weight_assigned_through_data_is_put_back():
    model, x = prepared(), torch.randn(4, 3)
    before = facts(model)
    memory = model.linear.weight.data_ptr()

    def closure():
        with torch.no_grad():
            model.linear.bias.fill_(7.0)
        model.linear.weight.data = torch.ones(3, 3)
        model.linear.weight.data.mul_(2.0)
        model.linear.bias.data = torch.ones(3)
        return model(x).sum()

    diagnose(model, closure, 1.0)
    assert changed(before, facts(model)) == set()
    assert model.linear.weight.data_ptr() == memory


def test_a_weight_written_after_data_was_assigned_is_put_back():
    model, x = prepared(), torch.randn(4, 3)
    before, alias = facts(model), model.linear.weight.data

    def closure():
        model.linear.weight.data = torch.ones(3, 3)
        alias.fill_(7.0)
        return model(x).sum()

    diagnose(model, closure, 1.0)
    assert changed(before, facts(model)) == set()


def test_containers_of_modules_are_put_back():
    model, x = prepared(), torch.randn(4, 3)
    model.history = [1]
    model.linear.cache = {"inner": {"calls": [0]}, "seen": {1}}
    model.linear.recent = deque([1, 2], maxlen=2)
    model.linear.counts = Counter(a=1)
    model.mean = torch.zeros(3)
    model.sums = {"x": torch.zeros(3)}
    containers = model.history, model.linear.cache, model.linear.recent

    def closure():
        model.history.append(2)
        model.linear.cache["inner"]["calls"][0] = 5
        model.linear.cache["seen"].add(2)
        model.linear.cache["more"] = x
        model.linear.recent.append(3)
        model.linear.counts["a"] += 1
        model.mean.add_(1.0)
        model.sums["x"].add_(1.0)
        return model(x).sum()

    diagnose(model, closure, 1.0)
    assert containers[0] is model.history == [1]
    assert containers[1] is model.linear.cache
    assert model.linear.cache == {"inner": {"calls": [0]}, "seen": {1}}
    assert containers[2] is model.linear.recent == deque([1, 2], maxlen=2)
    assert model.linear.counts == Counter(a=1)
    assert not model.mean.any()
    assert not model.sums["x"].any()


def test_modules_that_the_closure_adds_are_removed():
    model, x = prepared(), torch.randn(4, 3)
    model.layers = nn.ModuleList([nn.Linear(3, 3)])
    model.named = nn.ModuleDict({"a": nn.Linear(3, 3)})

    def closure():
        model.layers.append(nn.Linear(3, 3))
        model.named["b"] = nn.Linear(3, 3)
        return model(x).sum()

    diagnose(model, closure, 1.0)
    assert len(model.layers) == len(model.named) == 1


def test_hooks_and_flags_that_the_closure_sets_are_undone():
    model, x = prepared(), torch.randn(4, 3)
    before = facts(model)

    def closure():
        model.linear.register_forward_hook(lambda *_: None)
        model.train()
        model.register_buffer("seen", torch.ones(()))
        return model(x).sum()

    diagnose(model, closure, 1.0)
    assert changed(before, facts(model)) == set()


def test_a_user_hook_can_still_be_removed_afterwards():
    model, x = prepared(), torch.randn(4, 3)
    handle = model.linear.register_forward_hook(lambda *_: None)
    diagnose(model, lambda: model(x).sum(), 1.0)
    handle.remove()
    assert len(model.linear._forward_hooks) == 0


def test_no_graph_and_no_tensor_of_the_replay_is_kept():
    model, x = prepared(), torch.randn(4, 3)
    losses = []

    def closure():
        loss = model(x).pow(2).sum() * 1e9
        losses.append(weakref.ref(loss))
        return loss

    found = diagnose(model, closure, 2.0**120)
    gc.collect()
    assert found.found
    assert losses[0]() is None


def test_weights_that_share_memory_are_all_restored():
    model = nn.Linear(2, 2)
    memory = torch.arange(6.0)
    model.weight = nn.Parameter(memory[:4].view(2, 2))
    model.bias = nn.Parameter(memory[4:])

    def closure():
        with torch.no_grad():
            model.bias.fill_(9.0)
            model.weight.fill_(9.0)
        return model(torch.ones(1, 2)).sum()

    diagnose(model, closure, 1.0)
    assert torch.equal(memory, torch.arange(6.0))


def test_a_graph_that_the_closure_keeps_does_not_keep_the_replay_alive():
    model, x = prepared(), torch.randn(4, 3)
    kept = []

    def closure():
        kept.append(model(x).sum())
        return kept[0]

    diagnose(model, closure, 1.0)
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is ReplayMode] == []
