"""Handwritten rings and crosses. The growth interval is short, for a short run."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler

torch.manual_seed(41)


def make(n):
    y = torch.randint(0, 2, (n,))
    grid = torch.stack(
        torch.meshgrid(
            torch.linspace(-1, 1, 8), torch.linspace(-1, 1, 8), indexing="ij"
        )
    )
    ring = ((grid.pow(2).sum(0).sqrt() - 0.7).abs() < 0.2).float()
    cross = (grid.abs().amin(0) < 0.15).float()
    x = torch.where(y[:, None, None] == 0, ring, cross)[:, None]
    return x + torch.randn(n, 1, 8, 8), y


net = nn.Sequential(
    nn.Conv2d(1, 8, 3),
    nn.ReLU(),
    nn.Conv2d(8, 8, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(128, 2),
)
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scaler = GradScaler("cpu", init_scale=2.0**14, growth_interval=12)
skipped, seen, correct = 0, 0, 0
for i in range(200):
    x, y = make(16)
    opt.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    was = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < was
    seen, correct = seen + 16, correct + (logits.argmax(1) == y).sum().item()
    if i % 40 == 39:
        print(
            f"{i + 1}: loss {loss.item():.3f} acc {correct / seen:.3f} skipped {skipped}"
        )
        seen = correct = 0
