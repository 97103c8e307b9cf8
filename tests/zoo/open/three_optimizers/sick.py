"""A small VAE of gestures; encoder, prior and decoder have an optimizer each."""

import torch
from torch import nn

torch.manual_seed(24)


class VAE(nn.Module):
    def __init__(self, dim=12, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(dim, 24), nn.Tanh(), nn.Linear(24, 2 * latent)
        )
        self.prior = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, latent))
        self.decoder = nn.Sequential(
            nn.Linear(latent, 24), nn.Tanh(), nn.Linear(24, dim)
        )

    def forward(self, x, context):
        mean, logvar = self.encoder(x).float().chunk(2, -1)
        logvar = logvar.clamp(-6, 3)
        z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        centre = self.prior(context).float()
        kl = 0.5 * ((mean - centre).pow(2) + logvar.exp() - 1 - logvar).sum(-1).mean()
        return self.decoder(z).float(), kl


vae = VAE()
optimizers = [
    torch.optim.SGD(part.parameters(), lr=lr, momentum=0.9)
    for part, lr in ((vae.encoder, 0.01), (vae.prior, 0.02), (vae.decoder, 0.01))
]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=20)
basis = torch.randn(2, 12)
for step in range(240):
    context = torch.randn(16, 2)
    x = context @ basis + 0.1 * torch.randn(16, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        recon, kl = vae(x, context)
    loss = (recon - x).pow(2).sum(-1).mean() + 0.1 * kl
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()
    if step % 40 == 0:
        print(f"step {step} loss {loss.item():.3f} scale {scaler.get_scale():g}")
