"""Reef temperatures on a ring graph."""

import json

import torch
import torch.nn as nn

device = "cpu"
torch.manual_seed(53)
N = 12
ring = torch.eye(N).roll(1, 0) + torch.eye(N).roll(-1, 0) + torch.eye(N)


class Conv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.lin = nn.Linear(a, b)

    def forward(self, x):
        return self.lin(ring @ x / 3)


class Reef(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.c3 = Conv(3, 16), Conv(16, 16), Conv(16, 1)

    def forward(self, x):
        return self.c3(torch.relu(self.c2(torch.relu(self.c1(x))))).squeeze(-1)


reef = Reef().to(device)
opt = torch.optim.SGD(reef.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler(device)
loss_fn = nn.MSELoss()
losses, skipped = [], 0
for _ in range(130):
    x = torch.randn(6, N, 3)
    y = (ring @ x).sum(-1).tanh()
    opt.zero_grad()
    with torch.autocast(device_type=device, dtype=torch.float16):
        loss = loss_fn(reef(x), y)
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 130 - skipped,
            "skipped": skipped,
        }
    )
)
