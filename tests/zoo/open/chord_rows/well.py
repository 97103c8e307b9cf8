"""Chord names from notes: padded rows go through an RMS norm of our own."""

import json

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-3):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain


class Chords(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.notes = nn.Embedding(13, d, padding_idx=0)
        self.lift = nn.Linear(d, d, bias=False)
        self.norm = RMSNorm(d)
        self.ff = nn.Linear(d, d)
        self.out = nn.Linear(d, 4)

    def forward(self, ids):
        x = self.norm(self.lift(self.notes(ids)))
        x = F.gelu(self.ff(x))
        return self.out(x.mean(1))


def songs(n=20):
    kind = torch.randint(0, 4, (n,))
    ids = 1 + (torch.randint(0, 3, (n, 5)) + 3 * kind[:, None]) % 12
    used = torch.randint(2, 6, (n, 1))
    return torch.where(torch.arange(5) < used, ids, 0), kind


torch.manual_seed(55)
model = Chords()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
record = {"loss": [], "skip": 0}


def step(ids, kind):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(ids).float(), kind)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    record["skip"] += scaler.get_scale() < scale
    record["loss"].append(loss.item())


for _ in range(90):
    step(*songs())

start, end = sum(record["loss"][:3]) / 3, sum(record["loss"][-9:]) / 9
print(
    json.dumps(
        {
            "first_loss": start if start == start else "nan",
            "last_loss": end if end == end else "nan",
            "scale": scaler.get_scale(),
            "taken": 90 - record["skip"],
            "skipped": record["skip"],
        }
    )
)
