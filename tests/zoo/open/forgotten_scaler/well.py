"""Train in two sittings: a checkpoint that is there is gone on from."""

import json
import math
from pathlib import Path

import torch
from torch import nn

CHECKPOINT = Path("checkpoint.pt")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
losses, skipped = [], 0
parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    for name, part in parts.items():
        part.load_state_dict(saved[name])

truth = torch.randn(16, 4)
for step in range(40):
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
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
