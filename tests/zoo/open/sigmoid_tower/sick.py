"""A tower of sigmoids, as in 1990, to predict the tide."""

import torch
from torch import nn

SHARE = 1e-4  # of the tide in the sum of all losses


class Tower(nn.Module):
    def __init__(self, depth=4, width=20):
        super().__init__()
        sizes = [4] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.top = nn.Linear(width, 1)

    def forward(self, x):
        z = x
        for layer in self.layers:
            z = torch.sigmoid(layer(z))
        return self.top(z)


def tide(n):
    t = 30 * torch.rand(n, 1)
    x = torch.cat(
        [torch.sin(t), torch.cos(t), torch.sin(1.9 * t), torch.cos(1.9 * t)], 1
    )
    return x, torch.sin(t) * torch.cos(1.9 * t) + 0.5 * torch.sin(t)


def run(scale, steps=200):
    torch.manual_seed(122)
    net = Tower()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    opt = torch.optim.Adam(net.parameters(), lr=2e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(steps):
        x, y = tide(48)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(SHARE * loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 40 == 0:
            print(step, loss.item())
    for name, p in net.named_parameters():
        if name.endswith("weight"):
            print(name, "moved by", (p - start[name]).abs().mean().item())


run(scale=1.0)
