"""Train a small classifier with a loss scale that was fixed by hand."""

import torch
from torch import nn

SCALE = 2.0**10

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
truth = torch.randn(16, 4)

for step in range(60):
    x = torch.randn(32, 16)
    labels = (x @ truth).argmax(dim=-1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update(SCALE)
    if step % 10 == 0:
        print(step, loss.item())
