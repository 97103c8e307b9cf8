"""Fit in float16 with Adam, then polish in float32 with LBFGS, without the scaler."""

import torch
from torch import nn

torch.manual_seed(109)
x = torch.linspace(-2, 2, 80)[:, None]
y = torch.sin(2 * x) + 0.05 * torch.randn_like(x)
net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))

adam = torch.optim.Adam(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for _step in range(120):
    adam.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = nn.functional.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(adam)
    scaler.update()
print("adam", loss.item())

lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=8)


def closure():
    lbfgs.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss


for _ in range(5):
    loss = lbfgs.step(closure)
print("lbfgs", loss.item())
