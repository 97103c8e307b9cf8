"""Forecast the traffic of a web site; a campaign starts on some day."""

import json
import math

import torch
import torch.nn as nn

torch.manual_seed(17)
DAYS, LAGS = 240, 7


def visits():
    day = torch.arange(DAYS + LAGS)
    weekly = 1.0 + 0.3 * torch.sin(2 * math.pi * day / 7)
    level = torch.where(day < 170, 30_000.0, 55_000.0)
    return level * weekly * (1.0 + 0.05 * torch.randn(DAYS + LAGS))


series = visits()
past = series.unfold(0, LAGS, 1)[:DAYS] / 50_000
future = series[LAGS:, None]

net = nn.Sequential(nn.Linear(LAGS, 32), nn.Softplus(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
errors, taken, skipped = [], 0, 0
for t in range(16, DAYS):
    rows = torch.randint(t - 16, t, (16,))
    x = past[rows]
    y = future[rows].half() / 50_000
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(x).float(), y.float())
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    errors.append(loss.item())
    if t % 40 == 0:
        print("day", t, "error", errors[-1])

last = sum(errors[-20:]) / 20
print(
    json.dumps(
        {
            "first_loss": sum(errors[:5]) / 5,
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
