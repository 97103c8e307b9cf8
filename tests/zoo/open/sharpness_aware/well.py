"""Sharpness-aware minimisation on tiny spirals."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(144)
RHO = 0.05


def spirals(n):
    y = torch.randint(0, 2, (n,))
    r = 0.3 + 2 * torch.rand(n)
    a = 2.2 * r + 3.14 * y
    return torch.stack([r * a.cos(), r * a.sin()], 1) + 0.05 * torch.randn(n, 2), y


net = nn.Sequential(
    nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2)
)
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)


def scaled_backward(x, y):
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        out = net(x)
    loss = F.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    return loss.item()


for step in range(200):
    x, y = spirals(48)
    loss = scaled_backward(x, y)
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        # The scale cancels in g / |g|.
        moves = [RHO * p.grad / (norm + 1e-12) for p in net.parameters()]
        for p, move in zip(net.parameters(), moves):
            p.add_(move)
    scaled_backward(x, y)
    with torch.no_grad():
        for p, move in zip(net.parameters(), moves):
            p.sub_(move)
    scaler.step(opt)
    scaler.update()
    if step % 25 == 0:
        print(step, round(loss, 4))
