"""Metric embedding: distances of codes follow distances on the map."""

import json

import torch
from torch import nn


def distances(z):
    gap = z[:, None] - z[None]
    return (gap.pow(2).sum(-1) + 1e-6).sqrt()


torch.manual_seed(71)
embed = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 2))
project = torch.randn(2, 10)
sgd = torch.optim.SGD(embed.parameters(), lr=0.05, momentum=0.8)
scaler = torch.amp.GradScaler("cpu")


def closure():
    places = torch.rand(16, 2) * 4
    sgd.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        codes = embed(torch.sin(places @ project))
    stress = (distances(codes.float()) - distances(places)).square().mean()
    scaler.scale(stress).backward()
    return stress.item()


losses, skipped = [], 0
for _ in range(130):
    losses.append(closure())
    scaler.step(sgd)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 130 - skipped,
            "skipped": skipped,
        }
    )
)
