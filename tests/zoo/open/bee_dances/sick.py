"""Direction of a bee's dance; the network runs in mixed precision."""

import json

import torch
from torch import nn

torch.manual_seed(91)
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=16)
losses, skips = [], 0
for _ in range(200):
    dance = torch.randn(24, 10)
    food = torch.stack([dance[:, 0] - dance[:, 1], dance[:, 2] * dance[:, 3]], 1)
    opt.zero_grad()
    guess = net(dance)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 20 * nn.functional.mse_loss(guess.float(), food)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skips += scaler.get_scale() < scale
    losses.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-20:]) / 20,
            "scale": scaler.get_scale(),
            "taken": 200 - skips,
            "skipped": skips,
        }
    )
)
