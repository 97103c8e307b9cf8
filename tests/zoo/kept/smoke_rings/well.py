"""DDPM on a ring, with an average of the weights for sampling."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)
T = 50
betas = torch.linspace(1e-4, 0.08, T)
abar = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, d), nn.SiLU(), nn.Linear(d, d))
        self.inp = nn.Linear(2, d)
        self.mid = nn.Linear(d, d)
        self.out = nn.Linear(d, 2)

    def forward(self, x, t):
        freq = torch.exp(-math.log(100.0) * torch.arange(4) / 4)
        emb = t[:, None].float() * freq
        emb = self.time(torch.cat([emb.sin(), emb.cos()], 1))
        h = F.silu(self.inp(x) + emb)
        h = F.silu(self.mid(h) + h)
        return self.out(h)


def update_ema(ema, model, decay):
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.lerp_(p, 1 - decay)


model = Denoiser()
ema = copy.deepcopy(model).requires_grad_(False).eval()
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(150):
    angle = torch.rand(48) * 2 * math.pi
    x0 = torch.stack([angle.cos(), angle.sin()], 1)
    t = torch.randint(0, T, (48,))
    noise = torch.randn_like(x0)
    a = abar[t][:, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(xt, t), noise)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    update_ema(ema, model, min(0.99, (1 + step) / (10 + step)))
    if step % 30 == 0:
        print(step, round(loss.item(), 4))


@torch.no_grad()
def sample(net, n):
    x = torch.randn(n, 2)
    for i in reversed(range(T)):
        t = torch.full((n,), i)
        eps = net(x, t)
        x = (x - betas[i] / (1 - abar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
        if i:
            x += betas[i].sqrt() * torch.randn_like(x)
    return x


print("mean radius", sample(ema, 64).norm(dim=1).mean().item())
