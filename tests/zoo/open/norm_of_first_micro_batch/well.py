"""Denoise 1-d signals, four micro-batches to a step."""

import argparse
import json
import math

import torch
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args()


def signals(n, length=32):
    t = torch.linspace(0, 6.28, length)
    freq = torch.randint(1, 5, (n, 1))
    clean = torch.sin(freq * t + 6.28 * torch.rand(n, 1))
    return clean + 0.3 * torch.randn(n, length), clean


def main():
    args = parse()
    torch.manual_seed(7)
    denoiser = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    optimizer = torch.optim.SGD(denoiser.parameters(), lr=args.lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    losses, norms = [], []
    taken = skipped = 0
    for step in range(args.steps):
        total = 0.0
        optimizer.zero_grad()
        for micro in range(args.accum):
            noisy, clean = signals(8)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(denoiser(noisy), clean) / args.accum
            scaler.scale(loss).backward()
            total += loss.item()
            if micro == args.accum - 1:
                scaler.unscale_(optimizer)
                norms.append(max(p.grad.abs().max() for p in denoiser.parameters()))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            taken += 1
        losses.append(total)
        if step % 10 == 0:
            print(step, total, norms[-1].item())

    last = sum(losses[-5:]) / 5
    result = {
        "first_loss": sum(losses[:3]) / 3,
        "last_loss": last if math.isfinite(last) else "nan",
        "scale": scaler.get_scale(),
        "taken": taken,
        "skipped": skipped,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
