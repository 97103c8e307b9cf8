"""Solve u'' = -sin(x) with a network; its residuals are in tiny units."""

import json

import torch
from torch import nn

UNIT = 1e-7


class Field(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.lift(x))
        return self.drop(torch.tanh(self.mix(h)))


def residual(field, x, h=0.25):
    """The second difference of the field, and what it should be."""
    u = field(torch.cat([x - h, x, x + h])).float()
    left, middle, right = u.chunk(3)
    curvature = (left - 2 * middle + right) / h**2
    at_border = field(torch.tensor([[0.0], [3.14159]])).float()
    return (curvature + torch.sin(x)).pow(2).mean() + 10 * at_border.pow(2).mean()


torch.manual_seed(227)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=4e-3, eps=1e-20)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**34)
history, skipped = [], 0

for step in range(260):
    x = 3.14159 * torch.rand(12, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = residual(field, x) * UNIT
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += int(scaler.get_scale() < scale)
    history.append(loss.item())
    if step % 50 == 0:
        print(f"{step:4d} {loss.item():.3e}")

print(
    json.dumps(
        {
            "first_loss": sum(history[:8]) / 8,
            "last_loss": sum(history[-20:]) / 20,
            "scale": scaler.get_scale(),
            "taken": len(history) - skipped,
            "skipped": skipped,
        }
    )
)
