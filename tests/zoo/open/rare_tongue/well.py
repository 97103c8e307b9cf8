"""Adapters for a rare language are put into a frozen network."""

import json

import torch
from torch import nn


class Adapter(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(0.3 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        low = nn.functional.linear(x, self.a)
        return self.base(x) + nn.functional.linear(low, self.b)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, 24)
        self.mid = nn.Linear(24, 24)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        return self.out(torch.relu(self.mid(torch.relu(self.inp(x)))))


def inject(model):
    model.inp = Adapter(model.inp)
    model.mid = Adapter(model.mid)
    return model


def trainable(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("out") or name.endswith((".a", ".b")))
    return [p for p in model.parameters() if p.requires_grad]


torch.manual_seed(29)
reader = Reader()
inject(reader)
opt = torch.optim.AdamW(trainable(reader), lr=1e-2)
trainable(reader)
start = {n: p.detach().clone() for n, p in reader.named_parameters() if p.requires_grad}
rule = torch.randn(8, 5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skipped = [], 0
for _ in range(130):
    x = torch.randn(32, 8)
    y = (x @ rule).argmax(1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = reader(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())

now = dict(reader.named_parameters())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 130 - skipped,
            "skipped": skipped,
            "moved": {n: not torch.equal(p, now[n]) for n, p in start.items()},
        }
    )
)
