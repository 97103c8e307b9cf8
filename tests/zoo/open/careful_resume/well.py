"""A run in two parts: the second goes on from a checkpoint, with the state of the scaler."""

import io

import torch
import torch.nn.functional as F
from torch import nn


def build():
    net = nn.Sequential(
        nn.Linear(7, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 3)
    )
    return (
        net,
        torch.optim.Adam(net.parameters(), lr=3e-3),
        torch.amp.GradScaler("cpu", init_scale=2.0**20),
    )


def train(net, opt, scaler, steps):
    for step in range(steps):
        x = torch.randn(24, 7)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x).float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print(f"loss {loss.item():.4f} scale {scaler.get_scale():g}")


torch.manual_seed(52)
parts = build()
train(*parts, 80)
file = io.BytesIO()
torch.save([part.state_dict() for part in parts], file)
file.seek(0)
parts = build()
for part, state in zip(parts, torch.load(file)):
    part.load_state_dict(state)
train(*parts, 80)
