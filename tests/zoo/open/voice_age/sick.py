"""Age of a speaker: frames are pooled to their mean and standard deviation."""

import json

import torch
from torch import nn


class StatsPool(nn.Module):
    def forward(self, frames):
        spread = torch.sqrt(frames.var(dim=1))
        return torch.cat([frames.mean(dim=1), spread], dim=-1)


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.frame1 = nn.Linear(8, 20)
        self.frame2 = nn.Linear(20, 20)
        self.pool = StatsPool()
        self.age = nn.Linear(40, 1)

    def forward(self, x):
        x = torch.relu(self.frame1(x))
        x = torch.relu(self.frame2(x))
        return self.age(self.pool(x)).squeeze(-1)


def voices(n=16, frames=6):
    age = torch.rand(n)
    return torch.randn(n, frames, 8) * (0.5 + age)[:, None, None], 3 * age


class Loop:
    def __init__(self):
        torch.manual_seed(82)
        self.model = Speaker()
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=2e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.losses, self.skipped = [], 0

    def run(self, steps):
        for _ in range(steps):
            x, y = voices()
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            scale = self.scaler.get_scale()
            self.scaler.update()
            self.skipped += self.scaler.get_scale() < scale
            self.losses.append(loss.item())
        return self


loop = Loop().run(120)
print(
    json.dumps(
        {
            "first_loss": sum(loop.losses[:5]) / 5,
            "last_loss": sum(loop.losses[-15:]) / 15,
            "scale": loop.scaler.get_scale(),
            "taken": 120 - loop.skipped,
            "skipped": loop.skipped,
        }
    )
)
