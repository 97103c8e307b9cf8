"""Train with a gradient penalty in FP16: the gradient of a gradient.

  python examples/gradient_penalty.py

The inner gradient is taken of a scaled output, as every gradient in FP16, and divided
by the scale before the penalty is computed. The outer backward pass is scaled as usual.
"""

import argparse

import torch
from torch import nn

from gradscale.torch import GradScaler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def train(steps: int) -> tuple[float, float]:
    """Train; return the last loss and the last penalty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    # Lower than usual: the inner gradient is a part of the loss, which must be finite.
    scaler = GradScaler(DEVICE, init_scale=2.0**10, model=model)
    for step in range(1, steps + 1):
        x = torch.randn(16, 3, device=DEVICE, requires_grad=True)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            output = model(x).float()
        scaled_output = scaler.scale(output.sum())
        (slope,) = torch.autograd.grad(scaled_output, x, create_graph=True)
        # Differentiable, and in f32: autocast is off here.
        slope = slope / scaler.get_scale()
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = (output - x.detach().sum(1, keepdim=True)).square().mean()
        scaler.scale(loss + 0.1 * penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}, penalty {penalty.item():.3f}")
    return loss.item(), penalty.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    train(parser.parse_args().steps)
