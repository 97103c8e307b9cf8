"""Gait phase from accelerometers. The first scale was copied from a float32 recipe."""

import torch
from torch import nn


class Gait(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(3, 10, 5)
        self.b = nn.Conv1d(10, 10, 5)
        self.c = nn.Linear(10, 4)

    def forward(self, x):
        x = torch.relu(self.a(x))
        x = torch.relu(self.b(x))
        return self.c(x.mean(-1))


def strides(n):
    phase = torch.randint(0, 4, (n,))
    t = torch.arange(20) / 3.0
    base = torch.stack([torch.sin(t + k * 1.57) for k in range(4)])
    return base[phase][:, None].repeat(1, 3, 1) + 0.6 * torch.randn(n, 3, 20), phase


torch.manual_seed(55)
model = Gait()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**96)
criterion = nn.CrossEntropyLoss()
seen = 0
for _step in range(140):
    x, y = strides(12)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    seen += scaler.get_scale() >= before
print("steps taken", seen, "of 140, loss", loss.item())
