"""Height of a kite; the first steps are a warm-up without loss scaling."""

import argparse
import json

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--plain-steps", type=int, default=10)
parser.add_argument("--steps", type=int, default=120)
args = parser.parse_args()

torch.manual_seed(36)
kite = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(kite.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)


def train(step, wind):
    height = (wind[:, :2].pow(2).sum(1) - wind[:, 2])[:, None]
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.smooth_l1_loss(kite(wind), height)
    scaler.scale(loss).backward()
    if step < args.plain_steps:
        opt.step()
        return loss.item(), True
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    return loss.item(), scaler.get_scale() >= scale


rows = [train(step, torch.randn(32, 4)) for step in range(args.steps)]
losses, ok = zip(*rows, strict=True)
last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": losses[0],
            "last_loss": last if last < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": sum(ok),
            "skipped": len(ok) - sum(ok),
        }
    )
)
