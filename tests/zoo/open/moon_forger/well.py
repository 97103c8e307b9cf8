"""A generative adversarial network that draws points of a crescent."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

torch.manual_seed(211)


def crescent(n):
    angle = math.pi * torch.rand(n)
    x = torch.stack([angle.cos() + 2, angle.sin() + 1], dim=1)
    return x + 0.05 * torch.randn(n, 2)


G = nn.Sequential(
    nn.Linear(4, 24), nn.BatchNorm1d(24), nn.LeakyReLU(0.2), nn.Linear(24, 2)
)
D = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=5e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=5e-3, betas=(0.5, 0.9))
scaler = torch.amp.GradScaler("cpu")
half = torch.autocast("cpu", dtype=torch.float16)
gaps, taken, skipped = [], 0, 0

for _ in range(130):
    real = crescent(24)
    noise = torch.randn(24, 4)

    opt_d.zero_grad()
    with half:
        fake = G(noise)
        on_real, on_fake = D(real), D(fake.detach())
    loss_d = bce(on_real.float(), torch.ones(24, 1))
    loss_d = loss_d + bce(on_fake.float(), torch.zeros(24, 1))
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)

    opt_g.zero_grad()
    with half:
        on_fake = D(fake)
    loss_g = bce(on_fake.float(), torch.ones(24, 1))
    scaler.scale(loss_g).backward()
    scaler.step(opt_g)

    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
    gap = fake.detach().float().mean(0) - real.mean(0)
    gaps.append(gap.norm().item())

print(
    json.dumps(
        {
            "first_loss": sum(gaps[:10]) / 10,
            "last_loss": sum(gaps[-40:]) / 40,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
