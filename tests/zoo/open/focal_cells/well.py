"""Detect rare cells with the focal loss."""

import torch
from torch import nn


def focal(logit, y, gamma=2.0, eps=1e-7):
    p = torch.sigmoid(logit.float()).clamp(eps, 1 - eps)
    rare = y * (1 - p) ** gamma * torch.log(p)
    common = (1 - y) * p**gamma * torch.log(1 - p)
    return -(rare + common).mean()


def cells(n):
    y = (torch.rand(n, 1) < 0.3).float()
    x = torch.randn(n, 10)
    x[:, :2] += 4 * y - 1
    return x, y


torch.manual_seed(30)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(150):
    x, y = cells(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = focal(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 25 == 0:
        print(step, loss.item(), scaler.get_scale())
