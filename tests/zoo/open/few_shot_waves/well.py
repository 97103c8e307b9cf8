"""Reptile: a start from which one step fits a new sine wave better."""

import copy
import json
import math

import torch
from torch import nn

META_LR = 0.3


def wave():
    amplitude = 0.5 + torch.rand(1)
    phase = math.pi * torch.rand(1) / 2

    def sample(n):
        x = torch.rand(n, 1) * 4 - 2
        return x, amplitude * torch.sin(x + phase)

    return sample


def network():
    return nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = network()
        self.value = nn.Linear(24, 1)

    def forward(self, x):
        return self.value(self.features(x))


torch.manual_seed(47)
meta = Regressor()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
learners = []
losses = []
taken = skipped = 0

for _task in range(160):
    sample = wave()
    fast = copy.deepcopy(meta)
    inner = torch.optim.SGD(fast.parameters(), lr=0.3)
    learners.append((fast, inner))
    x, y = sample(20)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(fast(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(inner)
    scaler.update()
    with torch.no_grad():
        moved = False
        for p, q in zip(meta.parameters(), fast.parameters(), strict=True):
            moved = moved or not torch.equal(p, q)
            p.lerp_(q, META_LR)
    taken += moved
    skipped += not moved
    losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:15]) / 15,
            "last_loss": sum(losses[-15:]) / 15,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
