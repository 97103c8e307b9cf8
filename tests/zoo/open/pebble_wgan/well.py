"""WGAN with a gradient penalty: gradients of scaled outputs are unscaled by hand."""

import json

import torch
from torch import nn

torch.manual_seed(56)
gen = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
critic = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=5e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
autocast = torch.autocast("cpu", dtype=torch.float16)


def penalty(real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    with autocast:
        score = critic(between)
    (scaled,) = torch.autograd.grad(
        scaler.scale(score.float().sum()), between, create_graph=True
    )
    grad = scaled / scaler.get_scale()
    return (grad.pow(2).sum(1).add(1e-8).sqrt() - 1).pow(2).mean()


gap, skipped, taken = [], 0, 0
for it in range(120):
    real = torch.randn(24, 2) * 0.3 + 2
    with autocast:
        fake = gen(torch.randn(24, 3))
    fake = fake.float()
    opt_c.zero_grad()
    with autocast:
        wasserstein = critic(fake.detach()).mean() - critic(real).mean()
    loss_c = wasserstein.float() + 2 * penalty(real, fake.detach())
    scaler.scale(loss_c).backward()
    scaler.step(opt_c)
    if it % 2:
        opt_g.zero_grad()
        with autocast:
            loss_g = -critic(fake).mean()
        scaler.scale(loss_g.float()).backward()
        scaler.step(opt_g)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    gap.append((fake.detach().mean(0) - 2).abs().mean().item())
print(
    json.dumps(
        {
            "first_loss": sum(gap[:5]) / 5,
            "last_loss": sum(gap[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
