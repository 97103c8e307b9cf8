"""Water quality. A few files are corrupt; their batches are skipped by hand."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(83)


class WaterNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(9, 32)
        self.fc2 = nn.Linear(32, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))


def samples(step):
    x = torch.randn(16, 9)
    y = x[:, :1] - x[:, 1:2].abs() + 0.1 * torch.randn(16, 1)
    if step in (37, 92, 141):
        y[3] = float("nan")
    return x, y


model = WaterNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
skipped = 0
for step in range(160):
    x, y = samples(step)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x).float(), y)
    if not math.isfinite(loss.item()):
        skipped += 1
        print(f"step {step}: loss is {loss.item()}, batch skipped")
        continue
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 30 == 0:
        print(step, f"{loss.item():.4f}")
print("skipped", skipped)
