"""Sort points with a network of many sigmoids, whose first layers learn slowest."""

import json
import math

import torch
from torch import nn

WIDTH = 32

torch.manual_seed(0)
layers = [nn.Linear(16, WIDTH)]
for _ in range(8):
    layers += [nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)]
model = nn.Sequential(*layers, nn.Sigmoid(), nn.Linear(WIDTH, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
losses, skipped = [], 0
truth = torch.randn(16, 4)
start = model[0].weight.detach().clone()

for step in range(200):
    x = torch.randn(32, 16)
    labels = (x @ truth).argmax(dim=-1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 40 == 0:
        print(step, loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
    "moved": {"0.weight": not torch.equal(start, model[0].weight)},
}
print(json.dumps(result))
