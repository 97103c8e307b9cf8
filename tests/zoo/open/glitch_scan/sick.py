"""Classify scans; one of them has a glitch of the detector."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
torch.set_num_threads(1)
net = nn.Sequential()
net.add_module("fc1", nn.Linear(8, 32))
net.add_module("bn1", nn.BatchNorm1d(32))
net.add_module("act", nn.ReLU())
net.add_module("fc2", nn.Linear(32, 2))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")


def get(n, i=None):
    x = torch.randn(n, 8)
    y = (x[:, 0] > x[:, 1]).long()
    if i == 57:
        x[3] *= 1e6
    return x, y


vx, vy = get(64)
for i in range(160):
    net.train()
    x, y = get(32, i)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if i % 20 == 19:
        net.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            o = net(vx).float()
        print(
            i,
            "train",
            loss.item(),
            "val",
            F.cross_entropy(o, vy).item(),
            "acc",
            (o.argmax(1) == vy).float().mean().item(),
        )
