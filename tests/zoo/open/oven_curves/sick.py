"""Oven temperature curves: a plain regression loop."""

import json

import torch
from torch import nn

torch.manual_seed(83)
oven = nn.Sequential(
    nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
)
optimizer = torch.optim.SGD(oven.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=12)
losses = []
skipped = 0

for _ in range(140):
    x = torch.randn(32, 6)
    y = x[:, :1] - x[:, 1:2] + torch.sin(x[:, 2:3])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(oven(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())

last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": last if last < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": 140 - skipped,
            "skipped": skipped,
        }
    )
)
