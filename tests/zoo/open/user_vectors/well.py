"""Match users to items by the cosine of their vectors."""

import json

import torch
from torch import nn


class Unit(nn.Module):
    def forward(self, x):
        length = (x.pow(2).sum(dim=-1, keepdim=True) + 1e-6).sqrt()
        return x / length.clamp(min=1e-3)


class Tower(nn.Module):
    def __init__(self, n_in, n_out=12):
        super().__init__()
        self.fc1 = nn.Linear(n_in, 32, bias=False)
        self.fc2 = nn.Linear(32, n_out, bias=False)
        self.unit = Unit()

    def forward(self, x):
        return self.unit(self.fc2(torch.relu(self.fc1(x))))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(20), Tower(10)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1)


torch.manual_seed(13)
taste = torch.randn(20, 10)
model = TwoTowers()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
losses, taken, skipped = [], 0, 0

for step in range(200):
    # What a user has bought; new users have bought nothing yet.
    bought = (torch.rand(24, 20) < 0.15).float()
    features = torch.randn(24, 10)
    likes = torch.tanh((bought @ taste * features).sum(-1) / 4)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        score = model(bought, features)
        loss = nn.functional.mse_loss(score.float(), likes)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    losses.append(loss.item())
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f}")

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
