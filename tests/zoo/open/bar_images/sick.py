"""Variational autoencoder of small images of bars."""

import json

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.mu = nn.Linear(48, latent)
        self.logvar = nn.Linear(48, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 48), nn.ReLU(), nn.Linear(48, 64)
        )

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h).float(), self.logvar(h).float()
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def images(n):
    rows = torch.randint(8, (n,))
    columns = torch.randint(8, (n,))
    x = torch.zeros(n, 8, 8)
    x[torch.arange(n), rows] = 1.0
    x[torch.arange(n), :, columns] = 1.0
    return x.flatten(1)


def main():
    torch.manual_seed(3)
    vae = VAE()
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    losses, taken, skipped = [], 0, 0
    for _ in range(180):
        x = images(32)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits, mu, logvar = vae(x)
            bce = F.binary_cross_entropy_with_logits(logits.float(), x, reduction="sum")
            kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()
            loss = (bce + kl) / len(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            taken += 1
        losses.append(loss.item())
    summary = {
        "first_loss": sum(losses[:10]) / 10,
        "last_loss": sum(losses[-10:]) / 10,
        "scale": scaler.get_scale(),
        "taken": taken,
        "skipped": skipped,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
