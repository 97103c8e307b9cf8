"""Temperature along a rod: one head for the field, one for the heat flow."""

import json

import torch
from torch import nn

torch.manual_seed(61)


class Rod(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32))
        self.field = nn.Linear(32, 1)
        self.flow = nn.Linear(32, 1)

    def forward(self, points):
        h = torch.tanh(self.trunk(points))
        return self.field(h).squeeze(-1), self.flow(h.detach()).squeeze(-1)


def exact(points):
    x, t = points.unbind(-1)
    decay = torch.exp(-0.5 * t)
    return torch.sin(3 * x) * decay, -2 * torch.sin(3 * x) * decay


rod = Rod()
adam = torch.optim.Adam(rod.parameters(), lr=5e-3, eps=1e-16)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
FLOW_WEIGHT = 1e-8
flow_losses, taken, skipped = [], 0, 0

for _ in range(250):
    points = torch.rand(32, 2) * 2 - 1
    field, flow = exact(points)
    adam.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        field_hat, flow_hat = rod(points)
    field_loss = nn.functional.mse_loss(field_hat.float(), field)
    flow_loss = nn.functional.mse_loss(flow_hat.float(), flow)
    scaler.scale(field_loss + FLOW_WEIGHT * flow_loss).backward()
    scaler.step(adam)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
    flow_losses.append(flow_loss.item())

print("field", field_loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(flow_losses[:10]) / 10,
            "last_loss": sum(flow_losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
