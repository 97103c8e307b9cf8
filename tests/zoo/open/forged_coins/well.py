"""A GAN with two optimizers, one scaler and a hinge loss; five critic steps a turn."""

import torch
from torch import nn

torch.manual_seed(103)
gen = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 4))
critic = nn.Sequential(nn.Linear(4, 20), nn.LeakyReLU(0.1), nn.Linear(20, 1))
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
mint = torch.randn(4, 4)


def coins(n=16):
    return torch.randn(n, 4) @ mint * 0.3


def fakes(n=16):
    return gen(torch.randn(n, 3))


def half():
    return torch.autocast("cpu", dtype=torch.float16)


for turn in range(30):
    for _ in range(5):
        opt_c.zero_grad()
        with half():
            with torch.no_grad():
                fake = fakes()
            real_score, fake_score = critic(coins()), critic(fake)
        c_loss = (
            torch.relu(1 - real_score.float()).mean()
            + torch.relu(1 + fake_score.float()).mean()
        )
        scaler.scale(c_loss).backward()
        scaler.step(opt_c)
        scaler.update()
    for p in critic.parameters():
        p.requires_grad_(False)
    opt_g.zero_grad()
    with half():
        g_loss = -critic(fakes()).float().mean()
    scaler.scale(g_loss).backward()
    scaler.step(opt_g)
    scaler.update()
    for p in critic.parameters():
        p.requires_grad_(True)
    if turn % 6 == 0:
        print(turn, f"{c_loss.item():.3f} {g_loss.item():.3f}")
