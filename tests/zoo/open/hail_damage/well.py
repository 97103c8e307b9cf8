"""Cost of hail damage: a summed loss, clipped gradients."""

import json
import math

import torch
from torch import nn


class Hail(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 24))
        self.cost = nn.Linear(24, 1)

    def forward(self, x):
        return self.cost(torch.relu(self.enc(x))).squeeze(1)


torch.manual_seed(20)
hail = Hail()
optimizer = torch.optim.Adam(hail.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped, late = [], 0, 0
for it in range(140):
    storm = torch.randn(32, 5)
    damage = 8 * storm[:, 0].clamp(min=0) + 3 * storm[:, 1] + 5
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        cost = hail(storm)
    loss = (cost.float() - damage).square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(hail.parameters(), 20.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    late += scaler.get_scale() < scale and it > 30
    losses.append(loss.item())

last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": losses[0],
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": 140 - skipped,
            "skipped": skipped,
            "late_skips": late,
        }
    )
)
