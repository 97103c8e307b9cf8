"""Small training loops, for bitwise comparison of scalers."""

import gc
import time

import torch
from torch import nn

from gradscale.runfile import open_run


def net():
    """Return a small model, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def await_end(path):
    """Collect garbage and wait until the run file of a deleted scaler is closed.

    If the collector ran in the writer thread before, another thread closes the file.
    """
    gc.collect()
    until = time.monotonic() + 60.0
    with open_run(path) as run:
        while run.meta["end"]["state"] == "running" and time.monotonic() < until:
            time.sleep(0.01)


def await_rows(path, count):
    """Wait until the rows of deleted scalers are in a run file that stays open."""
    gc.collect()
    until = time.monotonic() + 60.0
    with open_run(path) as run:
        while len(list(run.steps())) < count and time.monotonic() < until:
            time.sleep(0.01)


def train(scaler, model, *, fused=False, unscale=False, steps=12, bad=(), dead=()):
    """Train, and return the losses and the scales.

    Args:
        scaler: Any scaler.
        model: What `net` returned.
        fused: Use the fused optimizer, which unscales by itself.
        unscale: Unscale and clip before the step.
        steps: Number of steps.
        bad: Steps in which a gradient of the last layer overflows.
        dead: Steps in which the loss is NaN.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    seen = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        output = model(torch.randn(3, 4)).square().mean()
        loss = output * (torch.nan if step in dead else 1.0)
        scaler.scale(loss).backward()
        if step in bad:
            model[2].weight.grad[0, 0] = torch.inf
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        seen.append((loss.item(), scaler.get_scale()))
    return seen
