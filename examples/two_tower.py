"""Train two towers with a contrastive loss in FP16, one loss for each direction.

  python examples/two_tower.py

Both losses reach both towers. Each has a scale of its own, and the gradients add up
exactly for any pair of scales. A batch that overflows is not lost: it is repeated at
the lower scale.
"""

import argparse

import torch
from torch import nn

from gradscale.torch import GradScaler, attempts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Towers(nn.Module):
    """Embeds two views of the same thing."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(6, 16)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the similarities f32[n, n]."""
        left = nn.functional.normalize(self.left(a).float(), dim=1)
        right = nn.functional.normalize(self.right(b).float(), dim=1)
        return left @ right.T * self.temperature.exp()


def train(steps: int) -> tuple[float, int]:
    """Train; return the last loss and the number of applied steps."""
    torch.manual_seed(0)
    model = Towers().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # So high that the first batches overflow.
    scaler = GradScaler(DEVICE, init_scale=2.0**20, model=model)
    mix = torch.randn(4, 14, device=DEVICE)
    target = torch.arange(16, device=DEVICE)
    for step in range(1, steps + 1):
        a, b = (torch.randn(16, 4, device=DEVICE) @ mix).split([8, 6], dim=1)
        for _ in attempts(scaler, model, retries=8):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.float16):
                similar = model(a, b)
            there = nn.functional.cross_entropy(similar, target)
            back = nn.functional.cross_entropy(similar.T, target)
            with scaler.loss(there, id="there") as scaled:
                scaled.backward(retain_graph=True)
            with scaler.loss(back, id="back") as scaled:
                scaled.backward()
            scaler.step(optimizer)
            scaler.update()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {(there + back).item():.3f}, {scaler.postfix()}")
    return (there + back).item(), int(scaler.applied_steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    train(parser.parse_args().steps)
