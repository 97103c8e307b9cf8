"""Classify spirals; the scaler starts where a large run once ended."""

import json
import math

import torch
from torch import nn

torch.manual_seed(0)
START = 2.0**32


def spirals(n):
    arm = torch.randint(3, (n,))
    r = torch.rand(n)
    phi = 4.0 * r + 2 * math.pi * arm / 3 + 0.1 * torch.randn(n)
    return torch.stack([r * phi.cos(), r * phi.sin()], dim=1), arm


net = nn.Sequential(
    nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=START)
losses, scales = [], [scaler.get_scale()]
for step in range(250):
    x, arm = spirals(32)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x), arm)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
    scales.append(scaler.get_scale())
    if step % 50 == 0:
        print(step, losses[-1], f"2^{math.log2(scales[-1]):.0f}")

skipped = sum(scales[i + 1] < scales[i] for i in range(len(losses)))
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scales[-1],
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
