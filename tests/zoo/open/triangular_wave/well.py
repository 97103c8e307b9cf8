"""Denoising diffusion of two moons in miniature, with a cyclic learning rate."""

import math

import torch
import torch.nn as nn

torch.manual_seed(109)
T = 20
beta = torch.linspace(1e-3, 0.2, T)
alpha_bar = torch.cumprod(1 - beta, 0)


class Denoiser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.time = nn.Embedding(T, width)
        self.inp = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = torch.nn.functional.silu(self.inp(x) + self.time(t))
        h = h + torch.nn.functional.silu(self.mid(h))
        return self.out(h)


def moons(n):
    upper = torch.rand(n, 1) < 0.5
    a = math.pi * torch.rand(n, 1)
    x = torch.where(upper, a.cos(), 1 - a.cos())
    y = torch.where(upper, a.sin(), 0.5 - a.sin())
    return torch.cat([x, y], 1) + 0.05 * torch.randn(n, 2)


net = Denoiser()
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
cycle = torch.optim.lr_scheduler.CyclicLR(
    opt, base_lr=0.01, max_lr=0.08, step_size_up=60
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
mean = 0.0
for step in range(240):
    x0 = moons(64)
    t = torch.randint(0, T, (64,))
    noise = torch.randn_like(x0)
    a = alpha_bar[t][:, None]
    with torch.autocast("cpu", dtype=torch.float16):
        eps = net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t)
    loss = (eps.float() - noise).pow(2).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    cycle.step()
    mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
    if step % 20 == 0:
        print(step, f"loss {mean:.4f}", f"lr {cycle.get_last_lr()[0]:.3f}")
