"""Sharpness-aware minimisation in FP16: an optimizer that runs two backward passes.

  python examples/sam.py

The optimizer calls a closure twice a step. `step_with_closure` unscales the gradients
of each pass before the optimizer sees them. A pass that overflows is repeated at a
lower scale.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradscale.torch import GradScaler, step_with_closure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class SAM(torch.optim.SGD):
    """SGD on gradients at the nearby weights with the largest loss."""

    rho = 0.05

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Climb by `rho`, take the gradient there, return, and descend."""
        closure = torch.enable_grad()(closure)
        loss = closure()
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        moves = [p.grad * (self.rho / (norm + 1e-12)) for p in params]
        torch._foreach_add_(params, moves)
        closure()
        torch._foreach_sub_(params, moves)
        super().step()
        return loss


def train(steps: int) -> float:
    """Train; return the last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1)).to(DEVICE)
    optimizer = SAM(model.parameters(), lr=0.1, momentum=0.9)
    scaler = GradScaler(DEVICE, model=model)
    for step in range(1, steps + 1):
        x = torch.randn(32, 4, device=DEVICE)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                output = model(x)
            loss = (output.float() - x.sum(1, keepdim=True).tanh()).square().mean()
            scaler.scale(loss).backward()
            return loss

        loss = step_with_closure(scaler, optimizer, closure)
        scaler.update()
        if loss is not None and (step % 50 == 0 or step == steps):
            last = loss.item()
            print(f"step {step}: loss {last:.3f}, {scaler.postfix()}")
    return last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    train(parser.parse_args().steps)
