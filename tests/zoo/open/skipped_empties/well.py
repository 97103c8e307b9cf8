"""Batches without a labelled pixel are left out before anything is computed."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(113)
net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)


def fields(n=6):
    x = torch.randn(n, 2, 7, 7)
    y = (x[:, 0] + x[:, 1] > 0).long()
    unlabelled = torch.rand(n, 7, 7) < 0.7
    if torch.rand(()) < 0.12:
        unlabelled[:] = True
    return x, y.masked_fill(unlabelled, 255)


left_out = 0
for _it in range(130):
    x, y = fields()
    if (y == 255).all():
        left_out += 1
        continue
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y, ignore_index=255)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
print("left out", left_out, "loss", loss.item())
