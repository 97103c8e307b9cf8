"""Plucked string to pitch; gradients come from autograd.grad and are put in place."""

import torch
from torch import nn

torch.manual_seed(41)


class Harp(nn.Module):
    def __init__(self):
        super().__init__()
        self.ear = nn.Conv1d(1, 8, 7, stride=3)
        self.body = nn.Linear(8 * 14, 16)
        self.pitch = nn.Linear(16, 1)
        self.loudness = nn.Linear(16, 1)

    def forward(self, wave, with_loudness=False):
        h = torch.relu(self.ear(wave)).flatten(1)
        h = torch.relu(self.body(h))
        return (self.pitch(h), self.loudness(h)) if with_loudness else (self.pitch(h),)


def pluck(n):
    f = 1 + torch.rand(n, 1)
    a = 0.5 + torch.rand(n, 1)
    t = torch.arange(46)[None] * 0.1
    wave = a * torch.exp(-t / 3) * torch.sin(2 * torch.pi * f * t)
    return wave[:, None], (f - 1.5, a - 1.0)


harp = Harp()
opt = torch.optim.RMSprop(harp.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
params = [p for p in harp.parameters() if p.requires_grad]
for i in range(130):
    wave, labels = pluck(16)
    both = i % 3 == 0
    with torch.autocast("cpu", dtype=torch.float16):
        outs = harp(wave, with_loudness=both)
    loss = sum((o.float() - y).abs().mean() for o, y in zip(outs, labels))
    grads = torch.autograd.grad(scaler.scale(loss), params, allow_unused=True)
    for p, g in zip(params, grads):
        p.grad = g
    scaler.step(opt)
    scaler.update()
    if i % 26 == 0:
        print(i, loss.item(), both)
print("done", loss.item())
