"""A GAN that learns to sample a ring of two-dimensional points."""

import json
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

torch.manual_seed(4)
BATCH = 32


def real_points():
    angle = 6.2832 * torch.rand(BATCH, 1)
    ring = torch.cat([angle.cos(), angle.sin()], 1)
    return torch.tensor([2.0, -1.0]) + ring + 0.05 * torch.randn(BATCH, 2)


def mlp(sizes):
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


netG, netD = mlp([4, 32, 2]), mlp([2, 32, 32, 1])
optG = torch.optim.Adam(netG.parameters(), lr=5e-3, betas=(0.5, 0.999))
optD = torch.optim.SGD(netD.parameters(), lr=0.1, momentum=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
distances, down = [], 0

for it in range(250):
    optG.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        fake = netG(torch.randn(BATCH, 4))
        errG = bce(netD(fake), ones)
    scaler.scale(errG).backward()
    scaler.step(optG)

    real = real_points()
    optD.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        errD = bce(netD(real), ones) + bce(netD(fake.detach()), zeros)
    errD.backward()
    scaler.step(optD)

    scale = scaler.get_scale()
    scaler.update()
    down += scaler.get_scale() < scale
    with torch.no_grad():
        distances.append((fake.float().mean(0) - real.mean(0)).norm().item())
    if it % 50 == 0:
        print(f"{it} D {errD.item():.3f} G {errG.item():.3f} gap {distances[-1]:.3f}")

print(
    json.dumps(
        {
            "first_loss": sum(distances[:10]) / 10,
            "last_loss": sum(distances[-20:]) / 20,
            "scale": scaler.get_scale(),
            "taken": len(distances) - down,
            "skipped": down,
        }
    )
)
