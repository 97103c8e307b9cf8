"""What a step does beside the pass: closures, hooks, parameters it passes over."""

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradscale.errors import StateError
from gradscale.torch.optim import AdamW
from tests.torch.optim.streams import (
    KINDS,
    TOLERANCE,
    everything,
    give,
    parameters,
    same,
    stream,
)

kinds = pytest.mark.parametrize(("kind", "how"), KINDS.values(), ids=KINDS)


def test_frozen_parameters_are_passed_over():
    params = parameters()
    params[1].requires_grad_(False)
    optimizer = AdamW(params)
    before = params[1].detach().clone()
    (params[0].sum() + params[2].sum()).backward()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


def test_a_step_without_any_gradient_does_nothing():
    optimizer = AdamW(parameters())
    before = everything(optimizer)
    optimizer.step()
    assert same(everything(optimizer), before)


@kinds
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(kind, how):
    params = parameters()
    optimizer = kind(params, **how)

    def closure():
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in params)
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_a_hook_of_every_optimizer_is_called_once(register):
    seen = []
    handle = register(lambda *_: seen.append("called"))
    try:
        AdamW(parameters()).step()
    finally:
        handle.remove()
    AdamW(parameters()).step()
    assert seen == ["called"]


@kinds
@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_parameter_of_another_size_is_refused(
    kind, how, size, with_grad, dtype, groups
):
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2)]
    parts = [params] if groups == 1 else [[param] for param in params]
    optimizer = kind([{"params": part} for part in parts], **how)
    give(params, [torch.ones(4)] * 2)
    optimizer.step()
    params[1].data = torch.ones(size, dtype=dtype)
    if with_grad:
        params[1].grad = torch.ones(size, dtype=dtype)
    before = everything(optimizer)
    with pytest.raises(StateError, match=rf"\(4,\), the parameter has \({size},\)"):
        optimizer.step()
    assert same(everything(optimizer), before)
    # What the message advises.
    params[1].grad = None
    del optimizer.state[params[1]]
    params[1].grad = torch.ones(size, dtype=dtype)
    optimizer.step()
    assert not torch.equal(params[1], torch.ones(size, dtype=dtype))


@kinds
def test_a_gradient_that_is_negated_on_reading_is_taken_as_it_reads(kind, how):
    def run(negate):
        params = parameters()
        optimizer = kind(params, **how)
        for grads in stream(3):
            give(params, [negate(grad) for grad in grads])
            optimizer.step()
        return everything(optimizer)

    assert same(run(lambda grad: torch._neg_view(grad)), run(torch.neg))


def test_a_profiler_hears_of_each_step():
    optimizer = AdamW(parameters())
    optimizer.step()
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
    heard = [event.name for event in profile.function_events]
    assert heard.count("Optimizer.step#AdamW.step") == 1


@kinds
def test_the_hooks_of_a_step_are_called_once(kind, how):
    params = parameters()
    optimizer = kind(params, **how)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    give(params, next(stream(1)))
    optimizer.step()
    assert seen == ["before", "after"]


def test_compiled_steps_are_those_that_are_not():
    def run(wrap):
        params = parameters()
        optimizer = AdamW(params, lr=0.25)
        step = wrap(optimizer.step)
        for grads in stream(3):
            give(params, grads)
            step()
        return everything(optimizer)

    compiled = run(lambda step: torch.compile(step, backend="eager"))
    # PyTorch's fused loops are left out of a compiled step.
    torch.testing.assert_close(
        compiled, run(lambda step: step), rtol=1e-5, atol=TOLERANCE["update"]
    )
