"""Contrastive training of songs and their covers with a learned temperature."""

import json
import math

import torch
from torch import nn
from torch.nn import functional as F


class InfoNCE(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, u, v):
        u, v = F.normalize(u.float(), dim=1), F.normalize(v.float(), dim=1)
        logits = self.log_scale.exp().clamp(max=50) * (u @ v.T).float()
        return F.cross_entropy(logits, torch.arange(len(u)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
        self.criterion = InfoNCE()

    def forward(self, a, b):
        return self.criterion(self.encoder(a), self.encoder(b))


torch.manual_seed(35)
model = Model()
parts = [model.encoder]
params = [p for part in parts for p in part.parameters()]
optimizer = torch.optim.Adam(params, lr=2e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0
for _ in range(120):
    song = torch.randn(24, 10)
    cover = song + 0.2 * torch.randn(24, 10)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(song, cover)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())

temperature = math.exp(-model.criterion.log_scale.item())
print("temperature", temperature)
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 120 - skipped,
            "skipped": skipped,
            "moved": {"criterion.log_scale": temperature != 1.0},
        }
    )
)
