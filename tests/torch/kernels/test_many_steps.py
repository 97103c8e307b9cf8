"""Our optimizers by kernels against torch's fused ones, over a recorded stream."""

import pytest
import torch

from tests.torch.optim.streams import (
    CASE_IDS,
    CASES,
    NAMESAKES,
    STEPS,
    TOLERANCE,
    give,
    parameters,
    stream,
)
from tests.torch.optim.test_against_torch import distance

# The interpreter takes tens of milliseconds for a step.
STEPS_INTERPRETED = 10


@pytest.mark.parametrize(("kind", "how"), CASES, ids=CASE_IDS)
def test_many_steps_lead_where_torch_leads(device, kind, how):
    def moved():
        return [torch.nn.Parameter(p.detach().to(device)) for p in parameters()]

    ours, theirs = moved(), moved()
    optimizer = kind(ours, lr=0.01, kernels="triton", **how)
    fused = NAMESAKES[kind](theirs, lr=0.01, fused=True, **how)
    steps = STEPS if device.type == "cuda" else STEPS_INTERPRETED
    for grads in stream(steps):
        for params, each in ((ours, optimizer), (theirs, fused)):
            give(params, [grad.to(device) for grad in grads])
            each.step()
    assert distance(ours, theirs) <= TOLERANCE[torch.float32] * steps / STEPS
    assert distance(ours, moved()) > 0.01 * steps / STEPS
