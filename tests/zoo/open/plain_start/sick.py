"""The smallest training script that one would write."""

import itertools
import json

import torch
from torch import nn

torch.manual_seed(113)
net = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 6))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
centres = 2 * torch.randn(6, 16)

losses = []
weights = []
for step in range(150):
    label = torch.randint(6, (32,))
    x = centres[label] + torch.randn(32, 16)

    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
        loss = nn.functional.cross_entropy(logits.float(), label)

    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

    losses.append(loss.item())
    weights.append(net[0].weight.sum().item())
    if step % 30 == 0:
        print(step, losses[-1])

moves = sum(a != b for a, b in itertools.pairwise(weights))
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-5:]) / 5,
            "scale": scaler.get_scale(),
            "taken": moves,
            "skipped": len(weights) - 1 - moves,
        }
    )
)
