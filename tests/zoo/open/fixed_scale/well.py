"""Train a small classifier with a loss scale that was fixed by hand."""

import json
import math

import torch
from torch import nn

SCALE = 2.0**10

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
losses, skipped = [], 0
truth = torch.randn(16, 4)

for step in range(60):
    x = torch.randn(32, 16)
    labels = (x @ truth).argmax(dim=-1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), labels)
    scaler.scale(loss).backward()
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    scaler.update(SCALE)
    skipped += torch.equal(before, model[0].weight)
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
