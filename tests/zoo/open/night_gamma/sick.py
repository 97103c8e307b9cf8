"""Estimate the light of a scene from a photo of known surfaces."""

import json

import torch
from torch import nn


class ToneMap(nn.Module):
    def forward(self, x):
        return x.pow(1 / 2.2)


class Relight(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 24)
        self.light = nn.Linear(24, 8)
        self.tone = ToneMap()

    def forward(self, scene, albedo):
        light = nn.functional.softplus(self.light(torch.tanh(self.body(scene))))
        return self.tone(light * albedo)


def scenes(n=20):
    scene = torch.randn(n, 6)
    light = nn.functional.softplus(scene @ mixing)
    albedo = torch.rand(n, 8)
    # A few surfaces are black.
    albedo = torch.where(torch.rand(n, 8) < 0.002, 0.0, albedo)
    return scene, albedo, (light * albedo).pow(1 / 2.2)


torch.manual_seed(18)
mixing = torch.randn(6, 8)
net = Relight()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, taken = [], 0
for _ in range(130):
    scene, albedo, photo = scenes()
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(scene, albedo)
    loss = nn.functional.mse_loss(guess.float(), photo)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    taken += scaler.get_scale() >= scale
    losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": 130 - taken,
        }
    )
)
