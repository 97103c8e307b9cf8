"""Solve a differential equation with LBFGS in FP16: a closure under the scaler.

  python examples/pinn_lbfgs.py

A network learns u(x) with u'' = -u, u(0) = 0 and u'(0) = 1, which is the sine.
`step_with_closure` unscales the gradients of every evaluation that LBFGS requests.
"""

import argparse

import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler, step_with_closure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss: how far the network is from a solution, f32[]."""
    x = x.requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    start = u[:1].square().sum() + (slope[:1] - 1).square().sum()
    return (bend + u).square().mean() + start


def train(steps: int, *, half: bool = True, seed: int = 0) -> float:
    """Train; return the last loss."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(DEVICE)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=10, line_search_fn="strong_wolfe"
    )
    # So high that the first evaluations overflow.
    scaler = GradScaler(DEVICE, init_scale=2.0**20, model=model, enabled=half)
    x = torch.linspace(0, 3, 32, device=DEVICE).unsqueeze(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16, enabled=half):
            loss = residual(model, x).float()
        scaler.scale(loss).backward()
        return loss

    for step in range(1, steps + 1):
        step_with_closure(scaler, optimizer, closure)
        scaler.update()
        if step % 5 == 0 or step == steps:
            print(f"step {step}: {scaler.postfix()}")
    with torch.autocast(DEVICE, torch.float16, enabled=half):
        return residual(model, x).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    print(f"loss {train(parser.parse_args().steps):.5f}")
