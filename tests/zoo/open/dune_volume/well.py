"""Volume of dunes in litres: the summed loss is of the order of a million."""

import json

import torch
from torch import nn


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x).squeeze(1) * 30


torch.manual_seed(11)
model = Volume()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
history, skipped, late = [], 0, 0
for step in range(160):
    x = torch.randn(48, 6)
    litres = 150 * (x[:, 0] + x[:, 1].abs()) + 40 * x[:, 2]
    with torch.autocast("cpu", dtype=torch.float16):
        guess = model(x)
    loss = (guess.float() - litres).square().sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e4)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    late += scaler.get_scale() < scale and step > 30
    history.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(history[:5]) / 5,
            "last_loss": sum(history[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 160 - skipped,
            "skipped": skipped,
            "late_skips": late,
        }
    )
)
