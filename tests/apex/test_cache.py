"""The cast cache of O1: one cast a parameter, never a stale one, no IndexError."""

import pytest
import torch
from torch import nn

from gradscale.apex import amp
from gradscale.apex.amp import _amp_state


class Half(nn.Module):
    """Uses its weight twice in a function of the half list."""

    shape = (8, 8)

    @staticmethod
    def ops(x, weight):
        return x.mm(weight).mm(weight).sum()


class Single(nn.Module):
    """Uses its weight twice in a function of the single list."""

    shape = (2, 8)

    @staticmethod
    def ops(x, weight):
        return (x + torch.pow(weight, 2) + torch.pow(weight, 2)).sum()


class Promote(nn.Module):
    """Uses its weight twice in a function of the promote list."""

    shape = (2, 8)

    @staticmethod
    def ops(x, weight):
        return ((x * weight) * weight).sum()


def make(kind, dtype):
    module = kind()
    numel = kind.shape[0] * kind.shape[1]
    module.weight = nn.Parameter(torch.arange(numel, dtype=dtype).view(kind.shape))
    module.forward = lambda x: kind.ops(x, module.weight)
    return module


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [Half, Single, Promote])
def test_training_goes_on_after_an_evaluation(kind, dtype):
    model, x = make(kind, dtype), torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _amp_state.allow_incoming_model_not_fp32 = True
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)

    def training_step():
        model.weight.grad = None
        loss = model(x).sum()
        _amp_state.loss_scalers[0]._loss_scale = 4.0
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert model.weight.grad.dtype is dtype
        weight = model.weight.detach().clone().float().requires_grad_()
        kind.ops(x.clone(), weight).backward()
        torch.testing.assert_close(model.weight.grad.float(), weight.grad)
        model.weight.data -= 1.0

    training_step()
    with torch.no_grad():
        model(x)
    training_step()


@pytest.fixture
def cache():
    return amp.init().cache


def test_a_weight_is_cast_once_until_the_cache_is_cleared(cache):
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    layer(x)
    assert len(cache) == 2
    first = cache.half(layer.weight)
    layer(x)
    assert cache.half(layer.weight) is first
    cache.clear()
    assert cache.half(layer.weight) is not first


def test_shared_weights_and_two_forward_passes_give_the_sum_of_gradients(cache):
    layer, other, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(2, 4)
    other.weight = layer.weight
    (layer(x).float().sum() + other(layer(x)).float().sum()).backward()
    cached = layer.weight.grad.clone()
    layer.weight.grad = None
    _amp_state.handle._deactivate()
    (layer(x).sum() + other(layer(x)).sum()).backward()
    torch.testing.assert_close(cached, layer.weight.grad, rtol=1e-2, atol=1e-2)


def test_several_backward_passes_through_one_cast(cache):
    layer, x = nn.Linear(4, 1), torch.ones(1, 4)
    layer(x).sum().backward()
    layer(x).sum().backward()
    assert layer.weight.grad.tolist() == [[2.0, 2.0, 2.0, 2.0]]


def test_a_write_to_a_weight_is_seen(cache):
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    with torch.no_grad():
        layer(x)
        layer.weight.fill_(3.0)
        assert layer(x).item() == 6.0
        layer.weight.data = torch.full((1, 2), 4.0)
        assert layer(x).item() == 8.0


def test_a_write_through_data_is_seen_in_an_evaluation(cache):
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    layer(x)
    with torch.no_grad():
        for value in (3.0, 4.0):
            # Weights of an average are swapped in and out like this.
            layer.weight.data.copy_(torch.full((1, 2), value))
            assert layer(x).item() == 2.0 * value


def test_a_weight_that_is_frozen_or_trained_again_is_cast_again(cache):
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    layer.weight.requires_grad_(False)
    assert not layer(x).requires_grad
    layer.weight.requires_grad_(True)
    layer(x).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]


def test_scale_loss_clears_the_cache():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    loss = model(torch.ones(1, 2)).sum()
    assert len(_amp_state.handle.cache) == 2
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    assert len(_amp_state.handle.cache) == 0


def test_the_cache_can_be_off():
    cache = amp.init(enable_caching=False).cache
    nn.Linear(2, 1)(torch.ones(1, 2))
    assert len(cache) == 0
