"""Train a small VAE; steps whose gradient norm is not finite are left out."""

import json
import math

import torch
from torch import nn, optim
from torch.nn import functional as F

torch.manual_seed(1)


class VAE(nn.Module):
    def __init__(self, d=16, h=32, z=4):
        super().__init__()
        self.enc = nn.Linear(d, h)
        self.mu = nn.Linear(h, z)
        self.logvar = nn.Linear(h, z)
        self.dec = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, d))

    def forward(self, x):
        h = torch.relu(self.enc(x))
        mu, logvar = self.mu(h).float(), self.logvar(h).float()
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo(x, recon, mu, logvar):
    rec = F.mse_loss(recon.float(), x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()
    return rec + 0.1 * kl


def total_norm(parameters):
    return math.sqrt(sum(p.grad.float().norm().item() ** 2 for p in parameters))


vae = VAE()
opt = optim.Adam(vae.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=20)
mixing = torch.randn(3, 16)
losses, left_out = [], 0
for i in range(240):
    x = torch.randn(24, 3) @ mixing + 0.1 * torch.randn(24, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = elbo(x, *vae(x))
    opt.zero_grad()
    scaler.scale(loss).backward()
    losses.append(loss.item())
    if not math.isfinite(total_norm(vae.parameters())):
        left_out += 1
        continue
    scaler.step(opt)
    scaler.update()
    if i % 40 == 0:
        print(i, loss.item())

report = {
    "first_loss": sum(losses[:5]) / 5,
    "last_loss": sum(losses[-5:]) / 5,
    "scale": scaler.get_scale(),
    "taken": len(losses) - left_out,
    "skipped": left_out,
}
print(json.dumps(report))
