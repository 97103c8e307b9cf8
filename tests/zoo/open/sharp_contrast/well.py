"""Contrastive pretraining: two views of a sample must find each other."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(29)


class Encoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def info_nce(a, b, temperature):
    sim = a @ b.T / temperature
    weights = torch.exp(sim - sim.amax(dim=1, keepdim=True).detach())
    positive = weights.diagonal()
    return -torch.log(positive / weights.sum(dim=1) + 1e-4).mean()


encoder = Encoder()
opt = torch.optim.Adam(encoder.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, fell = [], 0
for step in range(150):
    # Sharper from one stage to the next.
    temperature = 0.5 if step < 50 else 0.2 if step < 90 else 0.07
    x = torch.randn(16, 20)
    one = x + 0.3 * torch.randn_like(x)
    two = x + 0.3 * torch.randn_like(x)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = info_nce(encoder(one), encoder(two), temperature)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    fell += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, losses[-1])
last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": last if last == last else "nan",
            "scale": scaler.get_scale(),
            "taken": len(losses) - fell,
            "skipped": fell,
        }
    )
)
