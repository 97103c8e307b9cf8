"""Autoencoder of folded cloth; the error is the root of a sum of squares."""

import json

import torch
from torch import nn


class Folds(nn.Module):
    def __init__(self, size=24, code=6):
        super().__init__()
        self.down = nn.Linear(size, 32)
        self.code = nn.Linear(32, code)
        self.up = nn.Linear(code, 32)
        self.back = nn.Linear(32, size)

    def forward(self, x):
        z = self.code(torch.tanh(self.down(x / 40)))
        return 40 * self.back(torch.tanh(self.up(z)))


def reconstruction(guess, truth):
    diff = guess.float() - truth
    return torch.sqrt((diff * diff).sum())


def cloth(n=32, size=24):
    x = torch.linspace(0, 3, size)
    depth, phase = 40 * torch.rand(n, 1), 3 * torch.rand(n, 1)
    return (depth * torch.sin(x + phase)).half()


torch.manual_seed(10)
net = Folds()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
curve = []
skips = 0
for _ in range(130):
    heights = cloth()
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = reconstruction(net(heights), heights)
    scaler.scale(loss).backward()
    scaler.step(opt)
    s = scaler.get_scale()
    scaler.update()
    skips += scaler.get_scale() < s
    curve.append(loss.item())

first, last = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
print(
    json.dumps(
        {
            "first_loss": first if first < 1e30 else "nan",
            "last_loss": last if last < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": len(curve) - skips,
            "skipped": skips,
        }
    )
)
