"""Forecast a tide gauge with a hand-made GRU; the loss scale has a lower bound."""

import json

import torch
from torch import nn

MIN_SCALE = 2.0**20


class Gauge(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Linear(1 + hidden, 2 * hidden)
        self.cand = nn.Linear(1 + hidden, hidden)
        self.readout = nn.Linear(hidden, 1)

    def forward(self, series):
        h = series.new_zeros(len(series), self.hidden)
        for level in series.unbind(1):
            z, r = torch.sigmoid(self.gates(torch.cat([level[:, None], h], 1))).chunk(
                2, 1
            )
            new = torch.tanh(self.cand(torch.cat([level[:, None], r * h], 1)))
            h = (1 - z) * h + z * new
        return self.readout(h).squeeze(1)


def tides(n, length=9):
    start = torch.rand(n, 1) * 12
    hours = start + torch.arange(length)
    level = torch.sin(hours / 2) + 0.4 * torch.sin(hours)
    return level[:, :-1], level[:, -1]


torch.manual_seed(1)
model = Gauge()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
losses, skipped = [], 0

for _epoch in range(6):
    for _batch in range(20):
        past, target = tides(24)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            guess = model(past)
        loss = 10 * ((guess.float() - target) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        # Do not let the scale collapse.
        if scaler.get_scale() < MIN_SCALE:
            scaler.update(MIN_SCALE)
        losses.append(loss.item())
    print("epoch", _epoch, losses[-1])

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
