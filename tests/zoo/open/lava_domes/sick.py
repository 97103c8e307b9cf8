"""Swelling of lava domes from tilt meters; an exponential linear unit by hand."""

import torch
from torch import nn

torch.manual_seed(412)


class ExpLinear(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x, x.exp() - 1)


class Dome(nn.Module):
    def __init__(self):
        super().__init__()
        self.tilt = nn.Linear(9, 24)
        self.unit = ExpLinear()
        self.core = nn.Linear(24, 24)
        self.swell = nn.Linear(24, 1)

    def forward(self, x):
        return self.swell(torch.tanh(self.core(self.unit(self.tilt(x)))))


lean = torch.randn(9, 1) / 3
dome = Dome()
optimizer = torch.optim.Adam(dome.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
lost = 0
for i in range(140):
    x = torch.randn(24, 9)
    if i % 8 == 6:
        # A tremor.
        x[:3] *= 15
    y = (x @ lean).clamp(-2, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        swell = dome(x)
    loss = (swell.float() - y).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    lost += scaler.get_scale() < before
    if i % 28 == 0:
        print(i, loss.item(), scaler.get_scale())
print(loss.item(), "lost", lost)
