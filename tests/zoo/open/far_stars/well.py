"""Normalised radial basis functions map star positions to their brightness."""

import torch
from torch import nn

gen = torch.Generator().manual_seed(102)
torch.manual_seed(102)


class NormalisedRBF(nn.Module):
    def __init__(self, dim, centres):
        super().__init__()
        self.project = nn.Linear(dim, dim)
        self.centres = nn.Parameter(torch.randn(centres, dim))

    def forward(self, x):
        z = self.project(x)
        d2 = (z.unsqueeze(1) - self.centres.to(z.dtype)).square().sum(-1)
        bump = torch.exp(-d2.float())
        return bump / (bump.sum(-1, keepdim=True) + 1e-9)


class Sky(nn.Module):
    def __init__(self):
        super().__init__()
        self.rbf = NormalisedRBF(2, 16)
        self.bright = nn.Linear(16, 1)

    def forward(self, x):
        return self.bright(self.rbf(x))


def observe(n, outlier):
    xy = torch.randn(n, 2, generator=gen)
    if outlier:
        xy[-1] = torch.tensor([14.0, -12.0])
    return xy, torch.sin(2 * xy[:, :1]) * torch.cos(xy[:, 1:])


def train(sky, steps=160):
    opt = torch.optim.Adam(sky.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(steps):
        xy, b = observe(48, outlier=step % 11 == 3)
        with torch.autocast("cpu", dtype=torch.float16):
            guess = sky(xy)
        loss = nn.functional.smooth_l1_loss(guess.float(), b)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0:
            yield step, loss.item(), scaler.get_scale()


for row in train(Sky()):
    print(*row)
