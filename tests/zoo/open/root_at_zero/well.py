"""Pull two views of the same thing together, push views of others apart."""

import json
import math

import torch
from torch import nn


class Distance(nn.Module):
    def forward(self, a, b):
        return ((a - b).square().sum(dim=-1) + 1e-3).sqrt()


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.distance = Distance()

    def forward(self, left, right):
        return self.distance(self.encoder(left), self.encoder(right))


torch.manual_seed(0)
model = Twins()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

left = torch.randn(100, 16, 16)
same = torch.rand(100, 16) < 0.5
others = torch.randn(100, 16, 16)
right = torch.where(same[..., None], left + 0.1 * torch.randn(100, 16, 16), others)
# The later batches come from another source, which has exact duplicates.
right[50:, 0], same[50:, 0] = left[50:, 0], True

for step in range(100):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        distance = model(left[step], right[step])
        apart = (1.0 - distance).clamp(min=0.0).square()
        loss = torch.where(same[step], distance.square(), apart).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
