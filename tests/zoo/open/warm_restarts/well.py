"""A residual network under a cosine schedule with warm restarts and evaluation."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(15)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.bn = nn.BatchNorm1d(width)
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(F.relu(self.bn(x)))))


net = nn.Sequential(
    nn.Linear(8, 32), Residual(32), Residual(32), nn.BatchNorm1d(32), nn.Linear(32, 1)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=30)


def data(n):
    x = torch.randn(n, 8)
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3].abs()) / 2


@torch.no_grad()
def evaluate():
    net.eval()
    x, y = data(64)
    with torch.autocast("cpu", dtype=torch.float16):
        value = F.mse_loss(net(x), y).item()
    net.train()
    return value


losses, taken, skipped = [], 0, 0
for step in range(240):
    x, y = data(32)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
    schedule.step()
    losses.append(loss.item())
    if step % 40 == 39:
        print(step, losses[-1], "test", evaluate())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
