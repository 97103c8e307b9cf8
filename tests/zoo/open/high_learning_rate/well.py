"""Fit a small network to a smooth function by gradient descent with momentum."""

import json
import math

import torch
from torch import nn

LEARNING_RATE = 0.003

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(120):
    x = torch.randn(32, 16)
    y = x.sin().sum(dim=1, keepdim=True)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
