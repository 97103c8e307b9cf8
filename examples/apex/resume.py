"""Checkpoints with `amp.state_dict()`: stop half-way, resume, and compare.

Written for NVIDIA apex: `gradscale run --as-apex examples/apex/resume.py`.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from apex import amp
from torch import nn


def make(args):
    """Return a model and its optimizer, initialized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return amp.initialize(model, optimizer, opt_level=args.opt_level)


def train(model, optimizer, steps, device):
    """Train on the batches of these steps; return the last loss."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 8, generator=generator).to(device)
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    return loss.item()


def main():
    """Print the last loss of a run, and of one that was stopped and resumed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    half = args.steps // 2
    model, optimizer = make(args)
    train(model, optimizer, range(half), args.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        torch.save(checkpoint, path)
        straight = train(model, optimizer, range(half, args.steps), args.device)
        checkpoint = torch.load(path)
    model, optimizer = make(args)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    resumed = train(model, optimizer, range(half, args.steps), args.device)
    print(f"loss {straight:.6f} resumed {resumed:.6f}")


if __name__ == "__main__":
    main()
