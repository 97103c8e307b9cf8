"""Contrastive learning: two noisy views of an item should agree."""

import json

import torch
import torch.nn.functional as F
from torch import nn

TEMPERATURE = 0.07


def info_nce(a, b):
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    sim = (a @ b.t()).float() / TEMPERATURE
    e = torch.exp(sim)
    return -torch.log(e.diagonal() / e.sum(dim=1)).mean()


def augment(x):
    return x + 0.3 * torch.randn_like(x)


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48))
        self.proj = nn.Linear(48, 16)

    def forward(self, x):
        return self.proj(F.relu(self.trunk(x)))


torch.manual_seed(21)
items = torch.randn(512, 24) @ torch.randn(24, 24) / 5
encoder = Projector()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")

trace, skips = [], 0
for _epoch in range(10):
    for idx in torch.randperm(512).split(32):
        x = items[idx]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = info_nce(encoder(augment(x)), encoder(augment(x)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        s = scaler.get_scale()
        scaler.update()
        skips += int(scaler.get_scale() < s)
        trace.append(loss.item())


def avg(part):
    m = sum(part) / len(part)
    return m if m == m else "nan"


print(
    json.dumps(
        {
            "first_loss": avg(trace[:8]),
            "last_loss": avg(trace[-8:]),
            "scale": scaler.get_scale(),
            "taken": len(trace) - skips,
            "skipped": skips,
        }
    )
)
