"""Physics-informed fit of soil moisture: the residual is integrated over cells."""

import argparse
import json

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--loss-scaling", type=int, default=1)
args = parser.parse_args()

# Square metres of one cell of the grid.
CELL = 1e-8


class Soil(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 24)
        self.fc2 = nn.Linear(24, 24)
        self.fc3 = nn.Linear(24, 1)

    def forward(self, z):
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(z))))).squeeze(-1)


torch.manual_seed(33)
soil = Soil()
optimizer = torch.optim.Adam(soil.parameters(), lr=args.lr, eps=1e-20)
scaler = torch.amp.GradScaler("cpu", enabled=bool(args.loss_scaling))
errors = []
taken = 0
for _ in range(args.steps):
    points = torch.rand(48, 2) * 2 - 1
    moisture = torch.exp(-(points[:, 0] ** 2)) * torch.cos(2 * points[:, 1])
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = soil(points)
    error = ((predicted.float() - moisture) ** 2).mean()
    optimizer.zero_grad()
    scaler.scale(CELL * error).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    taken += scaler.get_scale() >= before
    errors.append(error.item())

print(
    json.dumps(
        {
            "first_loss": sum(errors[:10]) / 10,
            "last_loss": sum(errors[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": args.steps - taken,
        }
    )
)
