"""Forecast the next move of a price from a window that is standardised."""

import json

import torch
from torch import nn

torch.manual_seed(29)


def series(length):
    """A wave with noise; the market is closed now and then, and the price stands."""
    t = torch.arange(length, dtype=torch.float32)
    price = 100 + 5 * torch.sin(t / 7) + 0.3 * torch.randn(length)
    price = torch.round(price * 4) / 4
    for start in range(710, length, 250):
        price[start : start + 30] = price[start]
    return price


def window(price, start, size=16):
    w = price[start : start + size]
    target = (price[start + size] - w[-1]) / 2
    return (w - w.mean()) / w.std(), target


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5)
        self.hidden = nn.Linear(96, 24)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        h = torch.relu(self.conv(x[:, None])).flatten(1)
        return self.out(torch.relu(self.hidden(h)))[:, 0]


price = series(4000)
fc = Forecaster()
opt = torch.optim.Adam(fc.parameters(), lr=2e-3)
sc = torch.amp.GradScaler("cpu")
ls = []
n_skip = 0
for start in range(0, 3900, 20):
    pairs = [window(price, s) for s in range(start, start + 20)]
    x = torch.stack([p[0] for p in pairs])
    y = torch.stack([p[1] for p in pairs])
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.smooth_l1_loss(fc(x).float(), y)
    sc.scale(loss).backward()
    sc.step(opt)
    was = sc.get_scale()
    sc.update()
    if sc.get_scale() < was:
        n_skip += 1
        continue
    ls.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(ls[:15]) / 15,
            "last_loss": sum(ls[-15:]) / 15,
            "scale": sc.get_scale(),
            "taken": len(ls),
            "skipped": n_skip,
        }
    )
)
