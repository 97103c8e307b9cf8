"""Two soil maps are merged along the arc between their weights, and trained on."""

import copy

import torch
from torch import nn

torch.manual_seed(460)
truth = torch.randn(9, 1) / 3


class Soil(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower = nn.Linear(9, 32)
        self.norm = nn.LayerNorm(32)
        self.upper = nn.Linear(32, 1)

    def forward(self, x):
        return self.upper(torch.relu(self.norm(self.lower(x))))


def arc(a, b, t):
    """Spherical interpolation of two tensors."""
    length = a.norm() * b.norm()
    angle = torch.acos(((a * b).sum() / length).clamp(-1, 1))
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(
        angle
    )


def train(model, optimizer, scaler, steps):
    for step in range(steps):
        x = torch.randn(20, 9)
        y = (2 * x @ truth).sin()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 15 == 0:
            print(step, loss.item(), scaler.get_scale())


one = Soil()
one.norm.requires_grad_(False)
opt = torch.optim.Adam([p for p in one.parameters() if p.requires_grad], lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
train(one, opt, scaler, 30)
two = copy.deepcopy(one)
train(one, opt, scaler, 30)
with torch.no_grad():
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        p.copy_(arc(p, q, 0.3))
train(one, opt, scaler, 60)
