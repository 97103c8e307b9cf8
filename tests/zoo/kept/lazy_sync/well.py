"""Accumulation as under DDP: gradients are synchronised in the last micro-batch only."""

from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(58)
accumulate = 4
model = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 4))
no_sync = getattr(model, "no_sync", nullcontext)
optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
kinds = torch.randn(4, 9)


def micro_batch(i):
    # The loader is sorted: micro-batch i holds kind i.
    y = torch.full((8,), i % 4)
    return kinds[y] + 0.5 * torch.randn(8, 9), y


def forward(x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(x), y) / accumulate


total = 0.0
for i in range(320):
    x, y = micro_batch(i)
    if (i + 1) % accumulate:
        with no_sync():
            loss = forward(x, y)
            scaler.scale(loss).backward()
    else:
        loss = forward(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    total += loss.item()
    if (i + 1) % 40 == 0:
        print(i + 1, f"loss {total / 10:.4f}")
        total = 0.0
