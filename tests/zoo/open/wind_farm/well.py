"""Turbine power curves. Steps whose norm is not finite are left out by hand."""

import torch
import torch.nn as nn


def curves(n):
    speed = torch.rand(n, 1) * 24
    power = 100 * torch.sigmoid((speed - 9) * 0.8) * (speed < 22)
    gust = torch.randn(n, 3)
    return torch.cat([speed / 24, gust], 1), power


def total_norm(model):
    return torch.stack([p.grad.norm() for p in model.parameters()]).norm()


torch.manual_seed(4)
model = nn.Sequential(
    nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
report = []
for _step in range(130):
    x, y = curves(24)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = (out.float() - y).pow(2).mean()
    scaler.scale(loss).backward()
    norm = total_norm(model) / scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    report.append((loss.item(), norm.item()))
print("steps", len(report), "last", report[-1] if report else None)
