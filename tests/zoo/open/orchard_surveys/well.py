"""Fruit count, ripeness and disease from one trunk; conflicting gradients are projected."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast

random.seed(3)
torch.manual_seed(3)


class Orchard(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU()
        )
        self.count = nn.Linear(24, 1)
        self.ripe = nn.Linear(24, 4)
        self.disease = nn.Linear(24, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.count(h), self.ripe(h), self.disease(h)


mix = torch.randn(12, 6)


def trees(n):
    x = torch.randn(n, 12)
    z = x @ mix
    return x, z[:, :1] / 3, z[:, 1:5].argmax(1), (z[:, 5:] > 0).float()


def flatten(params):
    return torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params]
    )


def surgery(per_task):
    total = torch.zeros_like(per_task[0])
    for mine in per_task:
        g = mine.clone()
        for other in random.sample(per_task, len(per_task)):
            dot = torch.dot(g, other)
            if other is not mine and dot < 0:
                g -= dot / other.square().sum().clamp(min=1e-12) * other
        total += g
    return total


net = Orchard()
params = list(net.parameters())
optimizer = torch.optim.Adam(params, lr=3e-3)
scaler = GradScaler("cpu", init_scale=2.0**14)
for step in range(120):
    x, count, ripe, disease = trees(24)
    with autocast("cpu", dtype=torch.float16):
        c, r, d = net(x)
    losses = [
        F.smooth_l1_loss(c.float(), count),
        F.cross_entropy(r.float(), ripe),
        F.binary_cross_entropy_with_logits(d.float(), disease),
    ]
    per_task = []
    for loss in losses:
        optimizer.zero_grad()
        scaler.scale(loss).backward(retain_graph=True)
        per_task.append(flatten(params))
    merged = surgery(per_task)
    at = 0
    for p in params:
        p.grad = merged[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    scaler.step(optimizer)
    scaler.update()
    if step % 30 == 0:
        print(step, [round(loss.item(), 3) for loss in losses])
print([round(loss.item(), 3) for loss in losses])
