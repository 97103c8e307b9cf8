"""Denoise one-dimensional signals with an autoencoder."""

import torch
from torch import nn

torch.manual_seed(66)


class Auto(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 6))
        self.dec = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 32))

    def forward(self, x):
        return self.dec(self.enc(x))


def signals(n):
    f = 1 + 3 * torch.rand(n, 1)
    clean = torch.sin(f * torch.linspace(0, 6, 32))
    return clean + 0.3 * torch.randn(n, 32), clean


net = Auto()
opt = torch.optim.Adam(net.parameters(), lr=3.0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(100):
    noisy, clean = signals(16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(noisy)
    loss = nn.functional.mse_loss(out.float(), clean)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
