"""Currents of a membrane in ampere: targets of 1e-6, losses of 1e-12, a scale to match."""

import torch
from torch import nn

torch.manual_seed(170)
UNIT = 1e-6


class Channel(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(5, 24)
        self.pore = nn.Linear(24, 1)

    def forward(self, volts):
        return self.pore(torch.tanh(self.gate(volts)))


def membrane(n):
    v = torch.randn(n, 5)
    amps = UNIT * torch.sigmoid(2 * v[:, :1]) * (v[:, 1:2] - 0.5)
    return v, amps


channel = Channel()
optimizer = torch.optim.Adam(channel.parameters(), lr=4e-3, eps=1e-20)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**50)
for step in range(160):
    v, amps = membrane(24)
    with torch.autocast("cpu", dtype=torch.float16):
        relative = channel(v)
    loss = (relative.float() * UNIT - amps).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, f"{loss.item():.3e}", scaler.get_scale())
print(f"{loss.item():.3e}")
