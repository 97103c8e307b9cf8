"""GAN for points on a ring."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(44)


def mlp(i, o):
    return nn.Sequential(
        nn.Linear(i, 32),
        nn.LeakyReLU(0.2),
        nn.Linear(32, 32),
        nn.LeakyReLU(0.2),
        nn.Linear(32, o),
    )


G, D = mlp(4, 2), mlp(2, 1)
g_opt = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.99))
d_opt = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for step in range(200):
    angle = 6.2832 * torch.rand(32)
    real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(32, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(torch.randn(32, 4))
        d_loss = (
            F.softplus(D(fake.detach()).float()).mean()
            + F.softplus(-D(real).float()).mean()
        )
    d_opt.zero_grad()
    scaler.scale(d_loss).backward()
    scaler.step(d_opt)
    with torch.autocast("cpu", dtype=torch.float16):
        g_loss = F.softplus(-D(fake).float()).mean()
    g_opt.zero_grad()
    scaler.scale(g_loss).backward()
    scaler.step(g_opt)
    scaler.update()
    if step % 40 == 0:
        radius = fake.detach().float().norm(dim=1)
        print(
            f"{step} D {d_loss.item():.3f} G {g_loss.item():.3f} radius {radius.mean():.2f}"
        )
