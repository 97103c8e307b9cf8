"""VAE with KL warm-up."""

import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, d_in=30, d_h=32, d_z=4):
        super().__init__()
        self.enc = nn.Linear(d_in, d_h)
        self.mu = nn.Linear(d_h, d_z)
        self.logvar = nn.Linear(d_h, d_z)
        self.dec1 = nn.Linear(d_z, d_h)
        self.dec2 = nn.Linear(d_h, d_in)

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h).float(), self.logvar(h).float().clamp(-8, 8)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec2(F.relu(self.dec1(z))), mu, logvar


torch.manual_seed(0)
patterns = (torch.rand(6, 30) > 0.6).float()
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
warmup_steps = 60
for step in range(140):
    x = patterns[torch.randint(0, 6, (24,))]
    x = torch.where(torch.rand_like(x) < 0.03, 1 - x, x)
    beta = min(1.0, step / warmup_steps)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        recon, mu, logvar = model(x)
        bce = F.binary_cross_entropy_with_logits(recon, x, reduction="none").sum(1)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
        loss = (bce.float() + beta * kl).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(f"{step:4d} bce {bce.mean().item():.2f} kl {kl.mean().item():.2f}")
