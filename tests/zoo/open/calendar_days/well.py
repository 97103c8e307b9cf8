"""Visitors of a museum by date, weather and school holidays."""

import datetime as dt

import torch
from torch import nn


class Museum(nn.Module):
    def __init__(self):
        super().__init__()
        self.when = nn.Linear(1, 12)
        self.what = nn.Linear(3, 12)
        self.join = nn.Linear(24, 24)
        self.visitors = nn.Linear(24, 1)

    def forward(self, date, facts):
        x = torch.cat([torch.tanh(self.when(date)), torch.tanh(self.what(facts))], -1)
        return self.visitors(torch.relu(self.join(x)))


def encode(day):
    return (day - dt.date(2022, 1, 1)).days / 365


def diary(days=640):
    rows = []
    for k in range(days):
        day = dt.date(2022, 1, 1) + dt.timedelta(days=k)
        rain, holiday = torch.rand(2).tolist()
        weekend = float(day.weekday() >= 5)
        many = 0.4 * weekend + 0.5 * rain + 0.5 * (holiday > 0.8) + 0.5 * k / days
        rows.append((encode(day), weekend, rain, float(holiday > 0.8), many))
    return torch.tensor(rows)


if __name__ == "__main__":
    torch.manual_seed(108)
    table = diary()
    net = Museum()
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu")
    for it in range(200):
        row = table[torch.randint(0, len(table), (32,))]
        with torch.autocast("cpu", dtype=torch.float16):
            guess = net(row[:, :1], row[:, 1:4])
            loss = (guess.float() - row[:, 4:]).abs().mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if it % 25 == 0:
            print(f"{it:4d} mae {loss.item():.4f}")
