"""A variational autoencoder of read counts."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Reparam(nn.Module):
    def forward(self, mu, logvar):
        std = torch.exp(0.5 * logvar.clamp(-8, 8))
        return mu + std * torch.randn_like(std)


class VAE(nn.Module):
    def __init__(self, genes=24, latent=4):
        super().__init__()
        self.enc = nn.Linear(genes, 32)
        self.mu = nn.Linear(32, latent)
        self.logvar = nn.Linear(32, latent)
        self.reparam = Reparam()
        self.dec = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, genes))

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = self.reparam(mu, logvar)
        # A quadratic stand-in for the divergence: counts are far from normal.
        prior = 0.5 * (mu.float() ** 2 + (logvar.float() / 8).square() - 1).mean()
        return self.dec(z), prior


torch.manual_seed(37)
profile = 30 * torch.rand(3, 24)
model = VAE()
opt = torch.optim.Adam(model.parameters(), lr=5e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
for it in range(110):
    x = torch.poisson(profile[torch.randint(0, 3, (16,))])
    if it % 4 == 3:
        # One deep library in a while.
        x[0] *= 60
    with torch.autocast("cpu", dtype=torch.float16):
        rec, prior = model(x)
    loss = F.l1_loss(rec.float(), torch.log1p(x)) + 1e-3 * prior
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 22 == 0:
        print(it, loss.item(), scaler.get_scale())
