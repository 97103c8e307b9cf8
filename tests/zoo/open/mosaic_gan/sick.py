"""A small GAN on points of a mosaic; one scaler, two optimizers."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(58)
gen = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
disc = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99))
opt_d = torch.optim.Adam(disc.parameters(), lr=4e-3, betas=(0.5, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)


def tiles(n):
    corner = torch.randint(0, 2, (n, 2)).float()
    return 2 + corner + 0.05 * torch.randn(n, 2)


def verdict(points, real):
    with torch.autocast("cpu", dtype=torch.float16):
        logit = disc(points)
    goal = torch.full_like(logit, float(real), dtype=torch.float32)
    return F.binary_cross_entropy_with_logits(logit.float(), goal)


start = {n: p.detach().clone() for n, p in disc.named_parameters()}
gap, taken, skipped = [], 0, 0
for _ in range(150):
    real = tiles(32)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = gen(torch.randn(32, 4))
    scaler.scale(verdict(real, 1) + verdict(fake.detach().float(), 0)).backward()
    opt_d.zero_grad(set_to_none=False)
    scaler.step(opt_d)

    opt_g.zero_grad(set_to_none=False)
    scaler.scale(verdict(fake.float(), 1)).backward()
    scaler.step(opt_g)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    gap.append((fake.detach().float().mean(0) - real.mean(0)).abs().sum().item())

print(
    json.dumps(
        {
            "first_loss": sum(gap[:5]) / 5,
            "last_loss": sum(gap[-20:]) / 20,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
            "moved": {n: not p.equal(start[n]) for n, p in disc.named_parameters()},
        }
    )
)
