"""Glacier melt, month by month, with weight normalisation of the recurrence."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(132)


class Melt(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.rec = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, months):
        h = torch.zeros(months.shape[0], 20)
        for t in range(months.shape[1]):
            h = torch.tanh(self.inp(months[:, t]) + self.rec(h)).float()
        return self.out(h)


def glacier(n):
    months = torch.randn(n, 6, 2)
    mass = torch.zeros(n)
    for t in range(6):
        mass = 0.8 * mass + months[:, t, 0] * torch.sigmoid(2 * months[:, t, 1])
    return months, mass[:, None]


model = Melt()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
weight_norm(model.rec)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
before = model.rec.weight.detach().clone()
for step in range(160):
    months, mass = glacier(24)
    with torch.autocast("cpu", dtype=torch.float16):
        guess = model(months)
    loss = (guess.float() - mass).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, round(loss.item(), 4))
print("recurrence moved by", (model.rec.weight - before).abs().max().item())
