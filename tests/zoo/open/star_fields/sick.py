"""Count the stars in a field: convolutions, then a sum over all positions."""

import json

import torch
from torch import nn


class SumPool(nn.Module):
    def forward(self, x):
        return x.sum(dim=(2, 3)) / 64


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.mix = nn.Conv2d(4, 8, 1)
        self.pool = SumPool()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 1)

    def forward(self, sky):
        x = torch.relu(self.mix(torch.relu(self.conv(sky))))
        return self.fc(torch.relu(self.norm(self.pool(x)))).flatten()


def fields(n, side=32):
    density = torch.rand(n, 1, 1, 1)
    stars = (torch.rand(n, 1, side, side) < 0.2 * density + 0.02).float()
    background = 300.0 * torch.rand(n, 1, 1, 1)
    return 200 * stars + background, (stars.mean((1, 2, 3)) - 0.1) * 10


torch.manual_seed(28)
counter = Counter()
opt = torch.optim.Adam(counter.parameters(), lr=2e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
losses = []
skipped = 0
for step in range(80):
    sky, count = fields(6)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(counter(sky), count)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    s = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < s
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, losses[-1])

first, last = sum(losses[:5]) / 5, sum(losses[-15:]) / 15
print(
    json.dumps(
        {
            "first_loss": "nan" if first != first else first,
            "last_loss": "nan" if last != last else last,
            "scale": scaler.get_scale(),
            "taken": 80 - skipped,
            "skipped": skipped,
        }
    )
)
