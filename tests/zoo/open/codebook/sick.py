"""A VQ-VAE whose codebook is refitted to the encoder from time to time."""

import json
import math

import torch
from torch import nn
from torch.nn import functional as F


class Codebook(nn.Module):
    def __init__(self, codes, dim):
        super().__init__()
        self.register_buffer("embed", torch.randn(codes, dim))

    def nearest(self, z):
        return torch.cdist(z.float(), self.embed).argmin(dim=1)

    def forward(self, z):
        quantized = self.embed[self.nearest(z)]
        return z + (quantized - z).detach(), F.mse_loss(z.float(), quantized)

    @torch.no_grad()
    def refit(self, z):
        """Move each code to the mean of the vectors that are nearest to it."""
        index = self.nearest(z)
        total = torch.zeros_like(self.embed).index_add_(0, index, z.float())
        count = torch.bincount(index, minlength=len(self.embed)).unsqueeze(1)
        self.embed.copy_(total / count)


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
        self.codebook = Codebook(codes=16, dim=4)
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x):
        z, commitment = self.codebook(self.encoder(x))
        return self.decoder(z), commitment


torch.manual_seed(4)
clusters = torch.randn(8, 12)
vqvae = VQVAE()
optimizer = torch.optim.Adam(vqvae.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skipped = [], 0
for step in range(200):
    x = clusters[torch.randint(8, (32,))] + 0.1 * torch.randn(32, 12)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        recon, commitment = vqvae(x)
        loss = F.mse_loss(recon, x) + 0.25 * commitment
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    s = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < s
    losses.append(loss.item())
    if step % 40 == 39:
        vqvae.codebook.refit(vqvae.encoder(x))
        print(step, losses[-1])

last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
