"""Classify sequences by a convolution over time; autocast is a decorator."""

import json

import torch
from torch import nn

torch.manual_seed(31)


class TemporalNet(nn.Module):
    def __init__(self, channels=3, classes=3):
        super().__init__()
        self.conv = nn.Conv1d(channels, 16, 5, padding=2)
        self.bn = nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        h = torch.relu(self.bn(self.conv(x)))
        return self.fc(h.mean(dim=-1))


half = torch.autocast("cpu", dtype=torch.float16, enabled=torch.cuda.is_available())
net = TemporalNet()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", growth_interval=16)


@half
def compute_loss(x, y):
    return nn.functional.cross_entropy(net(x), y)


def sequences(n=16, length=24):
    y = torch.randint(3, (n,))
    t = torch.arange(length)
    freq = (1.0 + y.float())[:, None, None] * torch.tensor([0.3, 0.5, 0.7])[:, None]
    return torch.sin(freq * t) + 0.7 * torch.randn(n, 3, length), y


losses, taken, skipped = [], 0, 0
for epoch in range(5):
    for _ in range(40):
        x, y = sequences()
        loss = compute_loss(x, y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            taken += 1
        losses.append(loss.item())
    print(epoch, sum(losses[-40:]) / 40, scaler.get_scale())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-20:]) / 20,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
