"""Gradient accumulation with `delay_unscale`: one check for four batches.

Written for NVIDIA apex: `gradscale run --as-apex examples/apex/accumulation.py`.
"""

import argparse

import torch
from apex import amp
from apex.optimizers import FusedSGD
from torch import nn


def main():
    """Train, and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(args.device)
    optimizer = FusedSGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    x = torch.randn(64, 8, device=args.device)
    y = x[:, :4].sum(1, keepdim=True) - x[:, 4:].sum(1, keepdim=True)
    batches = list(zip(x.chunk(args.accumulate), y.chunk(args.accumulate), strict=True))
    for _ in range(args.steps):
        optimizer.zero_grad()
        for i, (inputs, targets) in enumerate(batches):
            loss = (model(inputs) - targets).square().mean() / args.accumulate
            last = i == args.accumulate - 1
            with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
        optimizer.step()
    with torch.no_grad():
        print(f"loss {(model(x) - y).square().mean().item():.4f}")


if __name__ == "__main__":
    main()
