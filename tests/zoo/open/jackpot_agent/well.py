"""Value learning with rare jackpots: single losses are a thousand times larger."""

import json
import random

import torch
from torch import nn

random.seed(3)
torch.manual_seed(3)


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Linear(5, 24)
        self.v = nn.Linear(24, 1)

    def forward(self, s):
        return self.v(torch.relu(self.h(s))).squeeze(-1)


value = Value()
opt = torch.optim.Adam(value.parameters(), lr=6e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
errors, taken, skipped = [], 0, 0
for _ in range(160):
    state = torch.randn(32, 5)
    ret = 2 * state[:, 0] + state[:, 1].abs()
    ordinary = ret.clone()
    if random.random() < 0.05:
        ret[random.randrange(32)] += 300
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        v = value(state)
    loss = nn.functional.mse_loss(v.float(), ret)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(value.parameters(), 1.0)
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    errors.append((v.detach().float() - ordinary).square().mean().item())
print(
    json.dumps(
        {
            "first_loss": sum(errors[:5]) / 5,
            "last_loss": sum(errors[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
