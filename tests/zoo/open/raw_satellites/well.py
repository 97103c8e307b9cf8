"""Radiances up to 1e6; the model standardises its own input, in float32."""

import torch
from torch import nn

torch.manual_seed(149)


class Standardise(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return (x.float() - self.mean) / self.std


def radiance(n):
    ground = torch.randn(n, 1)
    x = 1e6 + 2e5 * (ground + 0.3 * torch.randn(n, 8))
    return x, ground


sample, _ = radiance(2000)
net = nn.Sequential(
    Standardise(sample.mean(0), sample.std(0)),
    nn.Linear(8, 32),
    nn.ReLU(),
    nn.Linear(32, 1),
)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for step in range(150):
    x, y = radiance(32)
    with torch.autocast("cpu", dtype=torch.float16):
        z = net(x)
    loss = nn.functional.mse_loss(z.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 25 == 0:
        print(f"{step} {loss.item():.4f}")
