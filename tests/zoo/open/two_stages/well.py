"""Two stages with an optimizer each; the scaler is kept. Norms are logged."""

import json

import torch
from torch import nn


def grad_norm(model, scale):
    total = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None)
    return total.sqrt().item() / scale


def stage(model, optimizer, scaler, steps, log):
    for _ in range(steps):
        x = torch.randn(24, 6)
        y = torch.sin(x[:, :1] + x[:, 1:2])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        log["norm"].append(grad_norm(model, scaler.get_scale()))
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        log["skip"] += scaler.get_scale() < scale
        log["loss"].append(loss.item())


torch.manual_seed(80)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
log = {"loss": [], "norm": [], "skip": 0}
stage(model, torch.optim.Adam(model.parameters(), lr=1e-2), scaler, 80, log)
stage(model, torch.optim.SGD(model.parameters(), lr=0.05), scaler, 60, log)
print("largest norm", max(log["norm"]))
print(
    json.dumps(
        {
            "first_loss": sum(log["loss"][:5]) / 5,
            "last_loss": sum(log["loss"][-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 140 - log["skip"],
            "skipped": log["skip"],
        }
    )
)
