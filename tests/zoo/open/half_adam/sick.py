"""Calibrate a sensor: learn its small error from temperature, pressure and age."""

import json

import torch
from torch import nn

torch.manual_seed(0)


class Correction(nn.Module):
    def __init__(self, inputs=3, width=24):
        super().__init__()
        self.hidden = nn.Linear(inputs, width)
        self.second = nn.Linear(width, width)
        self.error = nn.Linear(width, 1)
        nn.init.zeros_(self.error.weight)
        nn.init.zeros_(self.error.bias)

    def forward(self, x):
        h = torch.tanh(self.hidden(x))
        return self.error(torch.tanh(self.second(h)))


def readings(size):
    x = torch.randn(size, 3)
    error = 0.01 * x[:, :1] - 0.01 * torch.sin(x[:, 2:]) + 0.004 * x[:, 1:2]
    return x, error


correction = Correction().half()
optimizer = torch.optim.Adam(correction.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu")
losses, taken, skipped = [], 0, 0
for step in range(250):
    x, error = readings(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(correction(x).float(), error)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() >= before:
        taken += 1
    else:
        skipped += 1
    losses.append(loss.item())
    if step % 50 == 0:
        print(step, losses[-1])

last = sum(losses[-20:]) / 20
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": last if last == last else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
