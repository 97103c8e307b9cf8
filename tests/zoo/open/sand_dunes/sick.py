"""Diffusion on points of a dune; gradients are clipped to a norm of 1."""

import json

import torch
from torch import nn

torch.manual_seed(12)
levels = torch.linspace(0.05, 0.95, 8)
model = nn.Sequential(
    nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)


def dune(n):
    x = torch.rand(n) * 4 - 2
    return torch.stack([x, torch.sin(2 * x)], dim=1)


def backward():
    clean = dune(48)
    level = levels[torch.randint(0, 8, (48,))][:, None]
    noise = torch.randn_like(clean)
    noisy = (1 - level).sqrt() * clean + level.sqrt() * noise
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        guess = model(torch.cat([noisy, level], 1))
        loss = nn.functional.mse_loss(guess, noise)
    scaler.scale(loss).backward()
    return loss.item()


losses, skipped = [], 0
for _ in range(150):
    losses.append(backward())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-20:]) / 20,
            "scale": scaler.get_scale(),
            "taken": 150 - skipped,
            "skipped": skipped,
        }
    )
)
