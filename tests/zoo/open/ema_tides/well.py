"""Diffusion on a ring with an EMA of the weights, which is evaluated now and then."""

import copy
import math

import torch
from torch import nn

torch.manual_seed(107)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(2, 16)
        self.inp = nn.Linear(2, 32)
        self.mid = nn.Linear(48, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, x, t):
        emb = self.time(torch.cat([torch.sin(6 * t), torch.cos(6 * t)], 1))
        h = torch.relu(self.inp(x))
        return self.out(torch.relu(self.mid(torch.cat([h, emb], 1))))


def noised(n=48):
    a = 2 * math.pi * torch.rand(n, 1)
    x = torch.cat([a.cos(), a.sin()], 1)
    t, eps = torch.rand(n, 1), torch.randn(n, 2)
    return (1 - t).sqrt() * x + t.sqrt() * eps, t, eps


def loss_of(model):
    x, t, eps = noised()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x, t)
    return nn.functional.mse_loss(pred.float(), eps)


model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
for step in range(150):
    loss = loss_of(model)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters(), strict=True):
            a.lerp_(b, 0.05)
    if step % 30 == 0:
        with torch.no_grad():
            print(step, loss.item(), loss_of(ema).item())
