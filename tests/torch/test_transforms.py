"""Calls inside torch.func transforms, inference mode and FakeTensorMode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradscale.torch import GradScaler

INF = float("inf")


def square(scaler):
    return lambda values: scaler.scale((values * values).sum())


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f)(torch.ones(3)),
    "vmap": lambda f: torch.func.vmap(f)(torch.ones(2, 3)),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f))(torch.ones(2, 3)),
    "jvp": lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),))[1],
    "jacrev": lambda f: torch.func.jacrev(f)(torch.ones(3)),
}


# Of torch.jit, which torch's own forward-mode AD uses.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("begun", [False, True])
def test_a_loss_is_scaled_inside_a_transform_as_by_torch(transform, begun):
    ours = GradScaler("cpu", init_scale=4.0)
    torchs = torch.amp.GradScaler("cpu", init_scale=4.0)
    if begun:
        ours.scale(torch.ones(()))
    assert torch.equal(transform(square(ours)), transform(square(torchs)))


def test_gradients_of_a_transform_are_unscaled_by_the_scale_that_made_them():
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for _ in range(3):
        weight.grad = torch.func.grad(square(scaler))(weight.detach())
        assert weight.grad.tolist() == [2 * scaler.get_scale() * weight[0].item()] * 3
        scaler.step(optimizer)
        assert weight.tolist() == [0.0] * 3
        assert scaler.last is None or scaler.last.scale == scaler.get_scale() / 2
        scaler.update()
        assert scaler.last.scale == scaler.get_scale() / 2
        weight.data.fill_(1.0)


def trained(make, *, fused, unscale):
    scaler = make("cpu", init_scale=4.0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    for step in range(10):
        optimizer.zero_grad()
        loss = (weight * weight).sum() * (INF if step == 5 else 1.0)
        scaler.scale(loss).backward()
        # Alternately: a tensor made inside must not be written to outside.
        with torch.inference_mode(step % 2 == 0):
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_([weight], 1.0)
            weight.grad = weight.grad.clone()
        with torch.inference_mode(step >= 1 and step % 3 == 1):
            scaler.step(optimizer)
        with torch.inference_mode(step % 4 == 3):
            scaler.update()
    return weight.tolist(), scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_steps_in_inference_mode_end_as_under_torch(fused, unscale):
    ours = trained(GradScaler, fused=fused, unscale=unscale)
    assert ours == trained(torch.amp.GradScaler, fused=fused, unscale=unscale)


def test_a_scaler_that_begins_in_inference_mode_trains_afterwards():
    scaler = GradScaler("cpu", init_scale=4.0)
    with torch.inference_mode():
        scaler.scale(torch.ones(()))
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale((weight * weight).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0] * 3


def test_a_fused_optimizer_steps_on_fake_tensors():
    with FakeTensorMode():
        scaler = GradScaler("cpu")
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], fused=True)
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale((weight * weight).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert weight.shape == (3,)
