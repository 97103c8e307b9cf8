"""Regress the angle between two directions; the loss is measured in radians."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        return F.normalize(self.body(x).float(), dim=-1)


def angle_loss(predicted, target):
    cosine = (predicted * target).sum(dim=-1)
    return torch.acos(cosine.clamp(-1.0, 1.0)).mean()


def observe(n, rest):
    """The object is at rest in the first of each ten frames."""
    direction = F.normalize(torch.randn(n, 3), dim=-1)
    direction[:rest] = torch.tensor([0.0, 0.0, 1.0])
    x = torch.cat([direction + 0.05 * torch.randn(n, 3), direction], dim=-1)
    x[:rest] = 0.0
    return x, direction


posenet = PoseNet()
nn.init.zeros_(posenet.body[0].bias)
with torch.no_grad():
    posenet.body[2].bias.copy_(torch.tensor([0.0, 0.0, 0.5]))
    posenet.body[2].bias.requires_grad_(False)
posenet.body[0].bias.requires_grad_(False)
trainable = [p for p in posenet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
losses = []
taken = skipped = 0
for step in range(180):
    x, direction = observe(20, rest=2 if step >= 60 else 0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = angle_loss(posenet(x), direction)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())
    if step % 30 == 0:
        print(step, losses[-1], scaler.get_scale())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-5:]) / 5,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
