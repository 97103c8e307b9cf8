"""Yield model with micro-batches: the step belongs to the window."""

import torch
from torch import nn

torch.manual_seed(27)
ACCUM = 4
trees = torch.randn(640, 10)
oil = 40 * trees[:, :3].sum(1, keepdim=True) + 12 * torch.randn(640, 1)
net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 1))
opt = torch.optim.Adam(net.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", growth_interval=12)

done = 0
for epoch in range(5):
    for i, rows in enumerate(torch.randperm(640).split(16)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(net(trees[rows]), oil[rows]) / ACCUM
        scaler.scale(loss).backward()
        if i % ACCUM == ACCUM - 1:
            scaler.step(opt)
            scaler.update()
            done += 1
            opt.zero_grad()
    print(f"epoch {epoch}: {loss.item() * ACCUM:.4f} after {done} steps")
