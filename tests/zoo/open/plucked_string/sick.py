"""A physics-informed net for a plucked string: u_tt = u_xx with small residuals."""

import torch
from torch import nn

torch.manual_seed(21)


class String(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 1)

    def forward(self, xt):
        h = torch.tanh(self.first(xt))
        h = torch.tanh(self.second(h))
        return self.third(h)


def finite_differences(net, xt, h=0.1):
    dx, dt = torch.tensor([[h, 0.0]]), torch.tensor([[0.0, h]])
    u = net(xt)
    u_xx = net(xt + dx) - 2 * u + net(xt - dx)
    u_tt = net(xt + dt) - 2 * u + net(xt - dt)
    return (u_tt - u_xx).float()


net = String()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)
for it in range(130):
    xt = torch.rand(32, 2)
    edge = torch.rand(32, 1)
    start = torch.cat([edge, torch.zeros_like(edge)], 1)
    with torch.autocast("cpu", dtype=torch.float16):
        residual = finite_differences(net, xt)
        shape = net(start).float()
    pluck = torch.sin(3.1416 * edge)
    loss = 1e-9 * (residual.square().mean() + (shape - pluck).square().mean())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 26 == 0:
        print(f"{it} {loss.item():.3e}")
