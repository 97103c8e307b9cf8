"""One window of accumulation holds a batch of each of four domains."""

import json
import statistics

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(8)
DOMAINS = 4
teachers = [torch.randn(10, 3) for _ in range(DOMAINS)]


class SharedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(10 + DOMAINS, 40)
        self.norm = nn.LayerNorm(40)
        self.head = nn.Linear(40, 3)

    def forward(self, x):
        return self.head(F.gelu(self.norm(self.trunk(x))))


def domain_batch(d):
    x = torch.randn(16, 10)
    y = torch.tanh(x @ teachers[d])
    tag = F.one_hot(torch.full((16,), d), DOMAINS).float()
    return torch.cat([x, tag], dim=1), y


net = SharedNet()
opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=100)
scaler = torch.amp.GradScaler("cpu")
means, lowered = [], 0
for window in range(100):
    parts = []
    for d in range(DOMAINS):
        x, y = domain_batch(d)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(net(x), y) / DOMAINS
        scaler.scale(loss).backward()
        parts.append(loss.item() * DOMAINS)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    lowered += scaler.get_scale() < before
    sched.step()
    means.append(statistics.fmean(parts))
    if window % 20 == 0:
        print(window, [round(p, 3) for p in parts])

print(
    json.dumps(
        {
            "first_loss": statistics.fmean(means[:3]),
            "last_loss": statistics.fmean(means[-5:]),
            "scale": scaler.get_scale(),
            "taken": len(means) - lowered,
            "skipped": lowered,
        }
    )
)
