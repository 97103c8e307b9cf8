"""Terrain heights; the learning rate follows the plateau of the loss."""

import torch
from torch import nn

torch.manual_seed(47)
net = nn.Sequential(
    nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
best, patience, decay = float("inf"), 0, 0.1
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


def heights(n=32):
    xy = 4 * torch.rand(n, 2) - 2
    return xy, torch.sin(2 * xy[:, :1]) * torch.cos(xy[:, 1:]) + 0.5 * torch.randn(n, 1)


for epoch in range(14):
    mean = 0.0
    for _ in range(12):
        xy, z = heights()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(xy)
        loss = nn.functional.mse_loss(out.float(), z)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        mean += loss.item() / 12
    patience = 0 if mean < 0.95 * best else patience + 1
    best = min(best, mean)
    if patience == 2:
        patience = 0
        for group in opt.param_groups:
            group["lr"] *= decay
    print(epoch, f"{mean:.4f}", opt.param_groups[0]["lr"])
