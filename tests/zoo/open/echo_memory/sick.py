"""Follow a signal with a lively recurrence, one value ahead."""

import json
import math

import torch
from torch import nn


class Reservoir(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.drive = nn.Linear(1, width)
        self.recur = nn.Linear(width, width, bias=False)
        self.readout = nn.Linear(width, 1)
        nn.init.orthogonal_(self.recur.weight, gain=4.0)

    def forward(self, signal):
        h = torch.zeros(signal.shape[0], self.recur.in_features)
        outputs = []
        for t in range(signal.shape[1]):
            h = torch.tanh(self.drive(signal[:, t]) + self.recur(h))
            outputs.append(self.readout(h))
        return torch.stack(outputs, dim=1)


def signals(n, length):
    t = torch.arange(length + 1.0)
    phase = 6.3 * torch.rand(n, 1)
    return torch.sin(0.4 * t + phase)[..., None]


torch.manual_seed(77)
rnn = Reservoir()
optimizer = torch.optim.Adam(rnn.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")

losses = []
taken = skipped = 0
for step in range(80):
    s = signals(8, 60)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        ahead = rnn(s[:, :-1])
    loss = nn.functional.mse_loss(ahead.float(), s[:, 1:])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"{step:4d} loss {losses[-1]:.3f}")

head, tail = sum(losses[:6]) / 6, sum(losses[-6:]) / 6
print(
    json.dumps(
        {
            "first_loss": head if math.isfinite(head) else "nan",
            "last_loss": tail if math.isfinite(tail) else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
