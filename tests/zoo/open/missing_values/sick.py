"""Predict the power of a plant from a table of its sensors."""

import json
import math
import random

import torch
from torch import nn

SENSORS = 8


def table(rows):
    """Return readings and the power they stand for; one sensor dies on the way."""
    numbers = random.Random(0)
    readings = [[numbers.gauss(0.0, 1.0) for _ in range(SENSORS)] for _ in range(rows)]
    power = [[math.tanh(sum(row)) + 0.1 * row[0]] for row in readings]
    for row in readings[rows // 2 :]:
        row[3] = math.nan
    return readings, power


torch.manual_seed(0)
readings, power = table(rows=1600)
inputs = torch.tensor(readings)
targets = torch.tensor(power)

model = nn.Sequential(nn.Linear(SENSORS, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step, (x, y) in enumerate(zip(inputs.split(16), targets.split(16), strict=True)):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
