"""Estimate the population of settlements from their outlines."""

import json
import math

import torch
from torch import nn

torch.manual_seed(41)

N = 1600
area = torch.exp(torch.randn(N) * 1.2 + 1.0)
density = torch.exp(torch.randn(N) * 0.25 + 7.0)
height = density / 1100 + 0.1 * torch.randn(N)
population = area * density
MEAN, SPREAD = 6000.0, 8000.0
features = torch.stack([area / 4, height, torch.randn(N)], dim=1)

regressor = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
out = nn.Linear(24, 1)
params = [*regressor.parameters(), *out.parameters()]
optimizer = torch.optim.RMSprop(params, lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def fit(index):
    x = features[index]
    y = (population[index] - MEAN) / SPREAD
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        guess = out(regressor(x)).squeeze(1)
        loss = nn.functional.mse_loss(guess.float(), y.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    previous = scaler.get_scale()
    scaler.update()
    return loss.item(), scaler.get_scale() >= previous


history = []
for _ in range(3):
    for index in torch.randperm(N).split(20):
        history.append(fit(index))

kept = [loss for loss, ok in history if ok and math.isfinite(loss)] or [float("nan")]
first, last = (sum(part) / len(part) for part in (kept[:10], kept[-10:]))
print(
    json.dumps(
        {
            "first_loss": "nan" if math.isnan(first) else first,
            "last_loss": "nan" if math.isnan(last) else last,
            "scale": scaler.get_scale(),
            "taken": sum(ok for _, ok in history),
            "skipped": sum(not ok for _, ok in history),
        }
    )
)
