"""A GAN on points; the discriminator's step comes first."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(20)


def mlp(i, o):
    return nn.Sequential(
        nn.Linear(i, 32),
        nn.LeakyReLU(0.2),
        nn.Linear(32, 32),
        nn.LeakyReLU(0.2),
        nn.Linear(32, o),
    )


gen, disc = mlp(4, 2), mlp(2, 1)
gen_opt = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
disc_opt = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=200)
for step in range(140):
    real = torch.randn(32, 2) * 0.2 + torch.randint(-1, 2, (32, 1)) * 3
    z = torch.randn(32, 4)

    disc_opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        fake = gen(z)
        d_loss = F.softplus(-disc(real).float()).mean()
        d_loss = d_loss + F.softplus(disc(fake.detach()).float()).mean()
    scaler.scale(d_loss).backward()
    scaler.step(disc_opt)

    gen_opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        g_loss = F.softplus(-disc(fake).float()).mean()
    scaler.scale(g_loss).backward()
    scaler.step(gen_opt)
    scaler.update()
    if step % 20 == 0:
        print(step, f"D {d_loss.item():.3f} G {g_loss.item():.3f}", scaler.get_scale())
