"""Wasserstein critic with gradient penalty between two clouds."""

import torch
from torch import nn

torch.manual_seed(143)
critic = nn.Sequential(
    nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
)
opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)


def penalty(real, fake):
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        value = critic(between).float().sum()
    (grad,) = torch.autograd.grad(scaler.scale(value), between, create_graph=True)
    grad = grad / scaler.get_scale()
    return (grad.norm(dim=1) - 1).square().mean()


for step in range(150):
    real = torch.randn(32, 2) * 0.5 + torch.tensor([2.0, 0.0])
    fake = torch.randn(32, 2) * 0.5
    with torch.autocast("cpu", dtype=torch.float16):
        gap = critic(fake).float().mean() - critic(real).float().mean()
    loss = gap + 5 * penalty(real, fake)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 25 == 0:
        print(f"{step}: wasserstein {-gap.item():.3f} loss {loss.item():.3f}")
