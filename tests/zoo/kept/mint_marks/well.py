"""DCGAN-like: the discriminator is trained three times as often as the generator."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)
nz = 8
netG = nn.Sequential(nn.Linear(nz, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
netD = nn.Sequential(
    nn.Linear(2, 32),
    nn.LeakyReLU(0.2),
    nn.Linear(32, 32),
    nn.LeakyReLU(0.2),
    nn.Linear(32, 1),
)
optD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cpu")
n_disc = 3


def real_marks(n):
    angle = torch.randint(0, 8, (n,)) * (torch.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


def bce(logits, value):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


for it in range(60):
    for _ in range(n_disc):
        optD.zero_grad()
        real = real_marks(32)
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                fake = netG(torch.randn(32, nz))
            lossD_real = bce(netD(real), 0.9)
            lossD_fake = bce(netD(fake), 0.0)
            lossD = lossD_real + lossD_fake
        scaler.scale(lossD).backward()
        scaler.step(optD)
        scaler.update()

    optG.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        lossG = bce(netD(netG(torch.randn(32, nz))), 1.0)
    scaler.scale(lossG).backward()
    scaler.step(optG)
    scaler.update()
    if it % 10 == 0:
        print(f"[{it}] D {lossD.item():.3f} G {lossG.item():.3f}")
