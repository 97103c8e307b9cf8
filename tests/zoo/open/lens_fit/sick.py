"""Fit of a lens model; sums of squares give large gradients."""

import json

import torch
from torch import nn


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**16)


class Lens(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 24)
        self.b = nn.Linear(24, 24)
        self.c = nn.Linear(24, 1)

    def forward(self, ray):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(ray))))).squeeze(-1)


torch.manual_seed(23)
lens = Lens()
opt = torch.optim.Adam(lens.parameters(), lr=5e-3)
losses, skipped, late = [], 0, 0
for epoch in range(24):
    for batch in range(6):
        scaler = make_scaler()
        ray = torch.randn(32, 3)
        bend = 30 * torch.tanh(ray[:, 0] - ray[:, 1] * ray[:, 2])
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = lens(ray)
        loss = (out.float() - bend).square().sum()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        late += scaler.get_scale() < scale and epoch * 6 + batch > 30
        losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
            "late_skips": late,
        }
    )
)
