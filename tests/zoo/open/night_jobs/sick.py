"""Training in short jobs: each one resumes from the checkpoint of the last."""

import json

import torch
from torch import nn

CHECKPOINT = {}


def build():
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    return {"model": model, "optimizer": optimizer, "scaler": scaler}


def save(parts):
    for name in ("model", "optimizer"):
        CHECKPOINT[name] = parts[name].state_dict()


def resume(parts):
    for name, state in CHECKPOINT.items():
        parts[name].load_state_dict(state)


def job(steps, log):
    parts = build()
    resume(parts)
    model, optimizer, scaler = parts.values()
    for _ in range(steps):
        x = torch.randn(32, 6)
        y = 50 * x[:, :1].abs() + 20 * x[:, 1:2]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = (out.float() - y).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        log.append((loss.item(), scaler.get_scale() < scale))
    save(parts)
    return scaler.get_scale()


torch.manual_seed(62)
log = []
for _ in range(6):
    scale = job(25, log)
losses = [loss for loss, _ in log]
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scale,
            "taken": sum(not lost for _, lost in log),
            "skipped": sum(lost for _, lost in log),
            "late_skips": sum(lost for _, lost in log[30:]),
        }
    )
)
