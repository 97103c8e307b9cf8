"""Recognise seven-segment digits; the scale finds its own level from above."""

import json

import torch
from torch import nn

SEGMENTS = torch.tensor(
    [
        [1, 1, 1, 0, 1, 1, 1],
        [0, 0, 1, 0, 0, 1, 0],
        [1, 0, 1, 1, 1, 0, 1],
        [1, 0, 1, 1, 0, 1, 1],
        [0, 1, 1, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1, 1],
    ]
).float()


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.wires = nn.Linear(7, 32)
        self.bn = nn.BatchNorm1d(32)
        self.digit = nn.Linear(32, len(SEGMENTS))

    def forward(self, x):
        return self.digit(torch.relu(self.bn(self.wires(x))))


torch.manual_seed(201)
digits = Digits()
opt = torch.optim.AdamW(digits.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
losses, skips = [], []
for step in range(180):
    label = torch.randint(len(SEGMENTS), (32,))
    x = SEGMENTS[label] + 0.3 * torch.randn(32, 7)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(digits(x).float(), label)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skips.append(step)
    losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - len(skips),
            "skipped": len(skips),
            "late_skips": sum(s >= 30 for s in skips),
        }
    )
)
