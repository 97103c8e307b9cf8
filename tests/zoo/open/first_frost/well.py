"""Date of the first frost. The scale starts far too high and comes down."""

import json

import torch
from torch import nn

torch.manual_seed(1)
frost = nn.Sequential(nn.Linear(5, 24), nn.GELU(), nn.Linear(24, 1))
opt = torch.optim.Adam(frost.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32)
losses, skipped, late = [], 0, 0
for it in range(150):
    x = torch.randn(24, 5)
    day = x[:, :1] + 0.5 * x[:, 1:2] ** 2
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(frost(x), day)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    late += scaler.get_scale() < scale and it > 30
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 150 - skipped,
            "skipped": skipped,
            "late_skips": late,
        }
    )
)
