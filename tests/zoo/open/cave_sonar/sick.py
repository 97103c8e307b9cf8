"""Depth of a cave from echoes; gradient noise is added before the step."""

import json

import torch
from torch import nn


class Sonar(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 6, 5, stride=2)
        self.fc1 = nn.Linear(48, 16)
        self.fc2 = nn.Linear(16, 1)

    def forward(self, echo):
        x = torch.relu(self.conv(echo[:, None])).flatten(1)
        return self.fc2(torch.relu(self.fc1(x))).squeeze(1)


def echoes(n, length=20):
    depth = torch.rand(n)
    t = torch.linspace(0, 1, length)
    echo = torch.exp(-40 * (t - depth[:, None]) ** 2)
    return echo + 0.05 * torch.randn(n, length), 4 * depth


def unscale(scaler, optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.div_(scaler.get_scale())


def perturb(optimizer, sigma):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad.add_(sigma * torch.randn_like(param.grad))


torch.manual_seed(27)
sonar = Sonar()
optimizer = torch.optim.SGD(sonar.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []
skipped = 0
for step in range(110):
    echo, depth = echoes(16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(sonar(echo), depth)
    scaler.scale(loss).backward()
    unscale(scaler, optimizer)
    perturb(optimizer, sigma=0.001 / (1 + step))
    scaler.step(optimizer)
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
            "taken": 110 - skipped,
            "skipped": skipped,
        }
    )
)
