"""VAE with an annealed prior: the weight of the KL term rises step by step."""

import json

import torch
from torch import nn


class Anneal:
    """Weight of the KL term: grows geometrically from 1e-3."""

    def __init__(self, rate=1.15, start=1e-3, end=1.0):
        self.rate, self.end = rate, end
        self.value = start

    def step(self):
        self.value = min(self.value * self.rate, self.end)


class VAE(nn.Module):
    def __init__(self, d=12, code=4):
        super().__init__()
        self.enc = nn.Linear(d, 24)
        self.mu = nn.Linear(24, code)
        self.lv = nn.Linear(24, code)
        self.dec = nn.Sequential(nn.Linear(code, 24), nn.Tanh(), nn.Linear(24, d))

    def forward(self, x):
        h = torch.tanh(self.enc(x))
        mu, lv = self.mu(h), self.lv(h)
        z = mu + torch.exp(0.5 * lv) * torch.randn_like(mu)
        return self.dec(z), mu.float(), lv.float()


torch.manual_seed(99)
mix = 2 * torch.randn(3, 12)
vae, anneal = VAE(), Anneal()
opt = torch.optim.Adam(vae.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
losses, skipped = [], 0
for _ in range(170):
    x = torch.randn(24, 3) @ mix
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        rebuilt, mu, lv = vae(x)
    error = (rebuilt.float() - x).pow(2).mean()
    kl = 0.5 * (mu.pow(2) + lv.exp() - 1 - lv).mean()
    scaler.scale(error + anneal.value * kl).backward()
    scaler.step(opt)
    s = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < s
    anneal.step()
    losses.append(error.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
