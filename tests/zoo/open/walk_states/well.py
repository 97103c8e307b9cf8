"""Predict where a walker goes next; four micro-batches make one update."""

import json
import math

import torch
from torch import nn

ACCUMULATE = 4


class World(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 32)
        self.mid = nn.Linear(32, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, state, action):
        h = torch.relu(self.inp(torch.cat([state, action], -1)))
        return state + self.out(torch.relu(self.mid(h)))


def transitions(n):
    state, action = torch.randn(n, 4), torch.randn(n, 2)
    force = torch.cat([torch.sin(state[:, :2]), action], dim=-1)
    return state, action, state + 0.5 * force


torch.manual_seed(43)
world = World()
optimizer = torch.optim.SGD(world.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
losses = []
taken = skipped = 0

for i in range(320):
    state, action, after = transitions(12)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = world(state, action)
    loss = nn.functional.mse_loss(predicted.float(), after)
    scaler.scale(loss / ACCUMULATE).backward()
    losses.append(loss.item())

    if (i + 1) % ACCUMULATE == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(world.parameters(), 5.0)

    if (i + 1) % ACCUMULATE == 0:
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            taken += 1

first, last = sum(losses[:12]) / 12, sum(losses[-12:]) / 12
print(
    json.dumps(
        {
            "first_loss": first if math.isfinite(first) else "nan",
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
