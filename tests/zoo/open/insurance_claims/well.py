"""Claims with a heavy tail: a rare batch overflows, and the scale recovers."""

import json

import torch
from torch import nn

torch.manual_seed(24)
net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=25)
tail = torch.distributions.StudentT(2.5)
losses, skipped = [], 0
for _ in range(170):
    x = torch.randn(32, 6)
    claim = 2 * x[:, 0] - x[:, 1] + 0.6 * tail.sample((32,))
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        guess = net(x).squeeze(1)
    loss = nn.functional.mse_loss(guess.float(), claim)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(opt)
    s = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < s
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:20]) / 20,
            "last_loss": sum(losses[-40:]) / 40,
            "scale": scaler.get_scale(),
            "taken": 170 - skipped,
            "skipped": skipped,
        }
    )
)
