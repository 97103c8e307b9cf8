"""Estimate orientations of edges with a convolutional network, plain SGD."""

import json
import math

import torch
from torch import nn


def edges(n, size=8):
    angle = math.pi * torch.rand(n)
    grid = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    ramp = xx * angle.cos()[:, None, None] + yy * angle.sin()[:, None, None]
    target = torch.stack([(2 * angle).cos(), (2 * angle).sin()], dim=1)
    return torch.tanh(4 * ramp).unsqueeze(1), target


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 24),
        nn.ReLU(),
        nn.Linear(24, 2),
    )


def run(steps, lr):
    net = network()
    dtype = next(net.parameters()).dtype
    opt = torch.optim.SGD(net.parameters(), lr=lr, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    out = {"losses": [], "taken": 0, "skipped": 0}
    for i in range(steps):
        images, target = edges(16)
        with torch.autocast("cpu", dtype=torch.float16):
            prediction = net(images.to(dtype))
        loss = nn.functional.mse_loss(prediction.float(), target)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        out["taken" if scaler.get_scale() >= scale else "skipped"] += 1
        out["losses"].append(loss.item())
        if i % 60 == 0:
            print(i, loss.item())
    out["scale"] = scaler.get_scale()
    return out


torch.manual_seed(3)
out = run(steps=300, lr=2e-3)
losses = out.pop("losses")
out["first_loss"] = sum(losses[:10]) / 10
out["last_loss"] = sum(losses[-20:]) / 20
print(json.dumps(out))
