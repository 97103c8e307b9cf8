"""Estimate a quantity and how uncertain it is."""

import json
import math

import torch
from torch import nn


class Gaussian(nn.Module):
    """Return a mean and a variance."""

    def __init__(self, width):
        super().__init__()
        self.mean = nn.Linear(width, 1)
        self.log_variance = nn.Linear(width, 1)
        # About the size of what is measured, so that the first steps are no leap.
        nn.init.zeros_(self.log_variance.weight)
        nn.init.constant_(self.log_variance.bias, 9.0)

    def forward(self, hidden):
        return self.mean(hidden), torch.exp(self.log_variance(hidden).clamp(max=10.0))


class Estimate(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.gaussian = Gaussian(32)

    def forward(self, x):
        return self.gaussian(self.body(x))


torch.manual_seed(0)
model = Estimate()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(120):
    x = torch.randn(32, 8)
    y = 1000.0 * torch.randn(32, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        mean, variance = model(x)
        loss = nn.functional.gaussian_nll_loss(mean.float(), y, variance.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, loss.item(), variance.max().item(), scaler.get_scale())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
