"""Will a customer leave? Features of an account, one of them a time stamp."""

import argparse
import json
import math

import torch
from torch import nn

NOW = 1.76e9
DAY = 86400.0


def accounts(n, gen):
    spend = torch.randn(n, 5, generator=gen)
    days = torch.rand(n, 1, generator=gen) * 30
    last_login = NOW - days * DAY
    leaves = (spend.sum(1) + 0.2 * days[:, 0] - 3 > 0).float()
    return spend, last_login, leaves


class Churn(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.hid = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return self.out(torch.tanh(self.hid(x))).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(6)
    gen = torch.Generator().manual_seed(61)
    model = Churn(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    bce = nn.BCEWithLogitsLoss()
    losses, skipped = [], 0
    for _ in range(args.steps):
        spend, last_login, leaves = accounts(24, gen)
        age = last_login
        x = torch.cat([spend, age], dim=1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = bce(model(x).float(), leaves)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        losses.append(loss.item())
    last = sum(losses[-10:]) / 10
    first = sum(losses[:5]) / 5
    return {
        "first_loss": first if math.isfinite(first) else "nan",
        "last_loss": last if math.isfinite(last) else "nan",
        "scale": scaler.get_scale(),
        "taken": args.steps - skipped,
        "skipped": skipped,
    }


print(json.dumps(main()))
