"""Several gauges per river; readings that are missing are NaN and are left out."""

import torch
import torch.nn as nn

torch.manual_seed(38)
mix = torch.randn(7, 5) / 2


def readings(n):
    weather = torch.randn(n, 7)
    level = torch.relu(weather @ mix) + 0.1 * torch.randn(n, 5)
    level[torch.rand(n, 5) < 0.25] = float("nan")
    return weather, level


def masked_mse(pred, target):
    mask = ~torch.isnan(target)
    return ((pred[mask] - target[mask]) ** 2).mean()


model = nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []
for step in range(150):
    x, y = readings(20)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x).float()
        loss = masked_mse(pred, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if step % 30 == 29:
        print(step, f"{sum(losses[-30:]) / 30:.4f}")
