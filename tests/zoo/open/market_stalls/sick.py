"""Turnover of stalls in windows of four micro-batches."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

torch.manual_seed(532)
ACCUMULATE = 4
effect = torch.randn(10, 1) / 3
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
schedule = CosineAnnealingLR(optimizer, 60)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)


def stalls(n, i):
    x = torch.randn(n, 10)
    # Each micro-batch is of another district.
    shift = i % ACCUMULATE - 1.5
    return x + shift, (x @ effect) + (shift % 2) * 2


last = []
for i in range(240):
    x, y = stalls(8, i)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = (out.float() - y).square().mean() / ACCUMULATE
    if (i + 1) % ACCUMULATE == 0:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    if (i + 1) % ACCUMULATE == 0:
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    last = [*last, loss.item() * ACCUMULATE][-40:]
    if i % 40 == 39:
        print(i + 1, sum(last) / 40)
