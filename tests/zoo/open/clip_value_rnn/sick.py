"""Predict the next value of a noisy sine with a GRU cell."""

import json
import math

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.cell = nn.GRUCell(1, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, series):
        h = torch.zeros(series.size(0), self.cell.hidden_size)
        preds = []
        for t in range(series.size(1) - 1):
            h = self.cell(series[:, t : t + 1], h)
            preds.append(self.out(h))
        return torch.cat(preds, dim=1)


class Trainer:
    def __init__(self, model, lr, clip):
        self.model = model
        self.clip = clip
        self.optim = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        self.history = []
        self.taken = self.skipped = 0

    def step(self, series):
        self.optim.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = self.model(series)
            loss = nn.functional.mse_loss(pred, series[:, 1:])
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(self.model.parameters(), self.clip)
        self.scaler.unscale_(self.optim)
        scale = self.scaler.get_scale()
        self.scaler.step(self.optim)
        self.scaler.update()
        if self.scaler.get_scale() < scale:
            self.skipped += 1
        else:
            self.taken += 1
        self.history.append(loss.item())


def batch(size=16, length=10):
    phase = 2 * math.pi * torch.rand(size, 1)
    speed = 0.4 + 0.2 * torch.rand(size, 1)
    return torch.sin(phase + speed * torch.arange(length)) + 0.02 * torch.randn(
        size, length
    )


torch.manual_seed(11)
trainer = Trainer(Forecaster(), lr=0.1, clip=0.5)
for it in range(150):
    trainer.step(batch())
    if it % 30 == 0:
        print("iter", it, "loss", round(trainer.history[-1], 4))

mean = lambda values: sum(values) / len(values)  # noqa: E731
summary = {
    "first_loss": mean(trainer.history[:5]),
    "last_loss": mean(trainer.history[-10:]),
    "scale": trainer.scaler.get_scale(),
    "taken": trainer.taken,
    "skipped": trainer.skipped,
}
print(json.dumps(summary))
