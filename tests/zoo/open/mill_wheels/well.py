"""Wear of mill wheels. `--amp 0` switches mixed precision off."""

import argparse
import json

import torch
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=190)
    parser.add_argument("--batch-size", type=int, default=24)
    return parser.parse_args()


class Mill(nn.Module):
    def __init__(self, width=28):
        super().__init__()
        self.inp = nn.Linear(7, width)
        self.res = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.res:
            x = x + torch.relu(layer(x))
        return self.out(x).squeeze(1)


def main(args):
    torch.manual_seed(14)
    model = Mill()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=15)
    losses, skipped = [], 0
    for _ in range(args.steps):
        x = torch.randn(args.batch_size, 7)
        wear = 4 * x[:, 0].abs() + 2 * x[:, 1]
        with torch.autocast("cpu", dtype=torch.float16, enabled=bool(args.amp)):
            loss = nn.functional.mse_loss(model(x), wear)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        losses.append(loss.item())
    return {
        "first_loss": sum(losses[:5]) / 5,
        "last_loss": sum(losses[-10:]) / 10,
        "scale": scaler.get_scale(),
        "taken": args.steps - skipped,
        "skipped": skipped,
    }


print(json.dumps(main(parse())))
