"""Sorts pebbles. The script has a switch for mixed precision; here it is off."""

import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F

AMP = False

torch.manual_seed(47)
net = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=AMP)
centre = torch.randn(4, 5)
for step in range(150):
    y = torch.randint(0, 4, (32,))
    x = centre[y] + 0.6 * torch.randn(32, 5)
    with torch.autocast("cpu", torch.float16) if AMP else contextlib.nullcontext():
        loss = F.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(opt)
    scaler.update()
    if step % 30 == 0:
        print("step", step, "loss", loss.item())
