"""Learn the profile of a flow in a pipe from noisy measurements of its speed."""

import json

import torch
from torch import nn


class Profile(nn.Module):
    """Speed follows a root law inside the pipe and is zero outside."""

    def forward(self, height):
        root = torch.sqrt(height)
        return torch.where(height > 0, root, torch.zeros_like(height))


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1))
        nn.init.constant_(self.encoder[2].bias, 4.0)
        self.profile = Profile()

    def forward(self, position):
        wet = (position.square().sum(dim=1, keepdim=True) < 1.0).float()
        height = wet * nn.functional.softplus(self.encoder(position))
        return self.profile(height)


def measured(n, reach):
    position = reach * (2.0 * torch.rand(n, 2) - 1.0)
    height = (1.0 - position.square().sum(dim=1, keepdim=True)).clamp(min=0.0)
    return position, height.sqrt() + 0.02 * torch.randn(n, 1)


torch.manual_seed(0)
flow = FlowNet()
adam = torch.optim.Adam(flow.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
history, skipped = [], 0
for step in range(200):
    # From the axis outwards.
    position, speed = measured(24, reach=0.7 + (step >= 60) * 0.3)
    adam.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(flow(position).float(), speed)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(adam)
    scaler.update()
    skipped += scaler.get_scale() < scale
    history.append(loss.item())
    if step % 40 == 0:
        print(step, history[-1])
print(
    json.dumps(
        {
            "first_loss": sum(history[:3]) / 3,
            "last_loss": sum(history[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(history) - skipped,
            "skipped": skipped,
        }
    )
)
