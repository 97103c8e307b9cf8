"""Forecast orders; micro-batches are gathered, and the rest of a day is flushed."""

import json
import math

import torch
from torch import nn

GATHER = 3


def day(index):
    """Eleven micro-batches a day."""
    generator = torch.Generator().manual_seed(1000 + index)
    for _ in range(11):
        x = torch.randn(10, 6, generator=generator)
        yield x, x[:, 0] * 0.8 - torch.relu(x[:, 1])


class Orders(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 28)
        self.total = nn.Linear(28, 1)

    def forward(self, x):
        return self.total(torch.relu(self.hidden(x))).squeeze(-1)


torch.manual_seed(107)
orders = Orders()
sgd = torch.optim.SGD(orders.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
losses = []
count = {"taken": 0, "skipped": 0}


def apply_gradients():
    scaler.step(sgd)
    scale = scaler.get_scale()
    scaler.update()
    count["skipped" if scaler.get_scale() < scale else "taken"] += 1
    sgd.zero_grad()


def flush():
    sgd.step()
    sgd.zero_grad()


for index in range(20):
    waiting = 0
    for x, y in day(index):
        with torch.autocast("cpu", dtype=torch.float16):
            guess = orders(x)
        loss = nn.functional.mse_loss(guess.float(), y)
        scaler.scale(loss / GATHER).backward()
        losses.append(loss.item())
        waiting += 1
        if waiting == GATHER:
            apply_gradients()
            waiting = 0
    if waiting:
        apply_gradients()

ends = [sum(losses[:5]) / 5, sum(losses[-11:]) / 11]
first, last = (e if math.isfinite(e) else "nan" for e in ends)
summary = {"first_loss": first, "last_loss": last, "scale": scaler.get_scale()}
print(json.dumps(summary | count))
