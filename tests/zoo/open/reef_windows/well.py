"""Uneven accumulation: each window has as many micro-batches as the reef has dives."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(104)


def reefs(count):
    for _ in range(count):
        dives = int(torch.randint(1, 6, ()))
        yield [dive() for _ in range(dives)]


def dive(n=8):
    y = torch.randint(0, 3, (n,))
    return F.one_hot(y, 3).float() @ colour + 0.6 * torch.randn(n, 9), y


colour = torch.randn(3, 9)
net = nn.Sequential(nn.Linear(9, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 3))
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for i, window in enumerate(reefs(60)):
    for x, y in window:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y) / len(window)
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if i % 12 == 0:
        print(i, len(window), norm.item(), loss.item() * len(window))
