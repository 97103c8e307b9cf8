"""Train in two sittings: a checkpoint that is there is gone on from."""

from pathlib import Path

import torch
from torch import nn

CHECKPOINT = Path("checkpoint.pt")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
parts = {"model": model, "optimizer": optimizer}
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
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)
