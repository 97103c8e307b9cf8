"""Variational autoencoder of shell outlines; the log-variance has a gain."""

import json

import torch
from torch import nn


class Sampler(nn.Module):
    """Draws a code from its mean and log-variance."""

    def forward(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 24)
        self.mu = nn.Linear(24, 4)
        self.logvar = nn.Linear(24, 4)
        self.sampler = Sampler()
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))

    def forward(self, x):
        h = torch.relu(self.body(x))
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(self.sampler(mu, logvar)), mu, logvar


def outlines(n):
    size = 20 * torch.rand(n, 2)
    # A few fossils are much larger.
    size = torch.where(torch.rand(n, 1) < 0.1, size * 25, size)
    angle = torch.linspace(0, 6.28, 16)
    return size[:, :1] * angle.cos() + size[:, 1:] * angle.sin()


torch.manual_seed(101)
vae = VAE()
opt = torch.optim.Adam(vae.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
losses, skipped = [], 0
for _ in range(140):
    x = outlines(24)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        rebuilt, mu, logvar = vae(x)
    mu, logvar = mu.float(), logvar.float().clamp(-8, 8)
    kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).mean()
    loss = (rebuilt.float() - x).abs().mean() + 1e-3 * kl
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())

first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": first if first < 1e30 else "nan",
            "last_loss": last if last < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": 140 - skipped,
            "skipped": skipped,
        }
    )
)
