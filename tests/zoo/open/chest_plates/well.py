"""Find the side of a shadow in small 16-bit plates. Hot pixels are saturated."""

import json

import torch
from torch import nn

FULL = 65535


class PlateNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, stride=2)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


def plates(n):
    raw = torch.randint(0, 40, (n, 1, 10, 10), dtype=torch.int32)
    side = torch.randint(0, 2, (n,))
    for k in range(n):
        lo = 5 * int(side[k])
        raw[k, 0, :, lo : lo + 5] += 120
        if torch.rand(()) < 0.04:
            r, c = torch.randint(0, 10, (2,)).tolist()
            raw[k, 0, r, c] = FULL
    return raw, side


def to_float(raw):
    return raw.clamp(max=255).float() / 64


torch.manual_seed(4)
net = PlateNet()
opt = torch.optim.Adam(net.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses = []
skipped = 0
for _ in range(110):
    raw, side = plates(12)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(to_float(raw))
        loss = nn.functional.cross_entropy(logits, side)
    scaler.scale(loss).backward()
    scaler.step(opt)
    prev = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < prev
    losses.append(loss.item())

tail = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": tail if tail == tail else "nan",
            "scale": scaler.get_scale(),
            "taken": 110 - skipped,
            "skipped": skipped,
        }
    )
)
