"""Take the noise out of small pictures."""

import json
import math

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(60):
    # From here on in larger batches, as the machine has room for them.
    size = 32 if step < 30 else 128
    pictures = 4.0 * torch.rand(size, 1, 1) * torch.randn(size, 16, 1) * torch.randn(16)
    pictures = pictures.flatten(1)
    noisy = pictures + 0.1 * torch.randn(size, 256)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        errors = (model(noisy) - pictures.half()).square()
        loss = errors.sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 10 == 0:
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
