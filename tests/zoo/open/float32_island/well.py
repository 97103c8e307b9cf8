"""Inverse problem: a physics residual in float32 beside a network in float16."""

import json
import math

import torch
from torch import nn

torch.manual_seed(33)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1, 32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        with torch.autocast("cpu", enabled=False):
            return self.last(h.float())


field = Field()
stiffness = nn.Parameter(torch.tensor(2.0))
opt = torch.optim.Adam([*field.parameters(), stiffness], lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
losses, fell = [], 0
for step in range(250):
    x = 2.0 * torch.rand(32, 1)
    step_size = 0.1
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        left, mid, right = field(x - step_size), field(x), field(x + step_size)
    # Second difference of u'' + k u = 0, by itself a small number.
    residual = (left - 2 * mid + right) + step_size**2 * stiffness * mid
    observed = torch.sin(math.pi * x / 2)
    loss = (mid - observed).square().mean() + 10.0 * residual.square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    fell += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 50 == 0:
        print(step, losses[-1], stiffness.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - fell,
            "skipped": fell,
        }
    )
)
