"""Autoencoder of spectra, kept small in memory."""

import json
import math

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = nn.Linear(24, 32)
        self.enc2 = nn.Linear(32, 6)
        self.dec1 = nn.Linear(6, 32)
        self.dec2 = nn.Linear(32, 24)

    def forward(self, x):
        z = self.enc2(torch.relu(self.enc1(x)))
        return self.dec2(torch.relu(self.dec1(z)))


def spectra(n, basis):
    return torch.rand(n, len(basis)) @ basis


torch.manual_seed(149)
basis = torch.randn(5, 24)
auto = Autoencoder()
auto = auto.half()
start = {name: p.detach().clone() for name, p in auto.named_parameters()}
optimizer = torch.optim.SGD(auto.parameters(), lr=0.02, momentum=0.9, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

losses = []
taken = skipped = 0
for step in range(240):
    x = spectra(24, basis)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        rebuilt = auto(x)
    loss = nn.functional.mse_loss(rebuilt.float(), x)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    old = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < old:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())
    if step % 60 == 0:
        print(step, loss.item())

last = sum(losses[-10:]) / 10
moved = {n: not torch.equal(p, start[n]) for n, p in auto.named_parameters()}
print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
            "moved": moved,
        }
    )
)
