"""Train a diffusion denoiser, restarting every stage from its averaged weights."""

import copy
import json
import math

import torch
from torch import nn

torch.manual_seed(16)


class Denoiser(nn.Module):
    def __init__(self, dim=2, width=48):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.inp = nn.Linear(dim, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        h = torch.nn.functional.silu(self.inp(x) + self.time(t))
        h = h + torch.nn.functional.silu(self.mid(h))
        return self.out(h)


class Average:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net)
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for mean, value in zip(self.net.parameters(), net.parameters(), strict=True):
            mean.mul_(self.decay).add_(value, alpha=1 - self.decay)


net = Denoiser()
ema = Average(net, decay=0.8)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
corners = torch.tensor([[1.5, 1.5], [-1.5, 1.5], [1.5, -1.5], [-1.5, -1.5]])
curve, fell = [], 0
for step in range(1, 181):
    x0 = corners[torch.randint(4, (32,))] + 0.1 * torch.randn(32, 2)
    t, noise = torch.rand(32, 1), torch.randn(32, 2)
    xt = (1 - t) * x0 + t * noise
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (net(xt, t).float() - noise).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    fell += scaler.get_scale() < scale
    ema.update(net)
    if step % 60 == 0:
        net.load_state_dict(ema.net.state_dict())
        print("stage", step // 60, "loss", loss.item())
    curve.append(loss.item())

last = sum(curve[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(curve[:5]) / 5,
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": len(curve) - fell,
            "skipped": fell,
        }
    )
)
