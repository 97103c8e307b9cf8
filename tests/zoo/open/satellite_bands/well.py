"""Adapt a network to a new satellite: first its statistics, then its layers."""

import json
import math

import torch
from torch import nn


class Land(nn.Module):
    def __init__(self, bands=8, classes=4):
        super().__init__()
        self.reduce = nn.Linear(bands, 24)
        self.bn = nn.BatchNorm1d(24)
        self.classify = nn.Linear(24, classes)

    def forward(self, pixels):
        return self.classify(torch.relu(self.bn(self.reduce(pixels))))


def pixels(n, signature):
    label = torch.randint(len(signature), (n,))
    reflected = signature[label] * (1 + 0.2 * torch.randn(n, 1))
    return torch.log(reflected.clamp(min=1e-3)), label


@torch.no_grad()
def calibrate(land, signature):
    """Collect the statistics of the new sensor from tiles without labels."""
    land.train()
    for tile in range(12):
        x, _ = pixels(32, signature)
        if tile == 7:
            # The border of the scene: nothing was recorded there.
            x[20:] = torch.log(torch.full((12, 8), 1e-3))
        land(x)


torch.manual_seed(157)
signature = 0.2 + 3 * torch.rand(4, 8)
land = Land()
calibrate(land, signature)
land.eval()
optimizer = torch.optim.AdamW(land.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

losses, taken, skipped = [], 0, 0
for _ in range(120):
    x, label = pixels(24, signature)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = land(x)
    loss = nn.functional.cross_entropy(logits.float(), label)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {"first_loss": first, "last_loss": last, "scale": scaler.get_scale()}
result = {k: v if math.isfinite(v) else "nan" for k, v in result.items()}
print(json.dumps(result | {"taken": taken, "skipped": skipped}))
