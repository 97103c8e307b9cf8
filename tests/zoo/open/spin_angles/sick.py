"""Estimate directions; the loss is the angle in radians."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(76)


class Direction(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 32), nn.Tanh())
        self.axis = nn.Linear(32, 3)

    def forward(self, x):
        return self.axis(self.body(x))


frame = torch.randn(3, 9)


def readings(n):
    direction = F.normalize(torch.randn(n, 3), dim=-1)
    return direction @ frame + 0.02 * torch.randn(n, 9), direction


def angle(pred, true):
    cos = (F.normalize(pred, dim=-1) * true.to(pred.dtype)).sum(-1)
    return torch.acos(cos).mean()


net = Direction()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(120):
    x, d = readings(32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = angle(net(x), d)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(f"{step} {loss.item():.4f} {scaler.get_scale()}")
