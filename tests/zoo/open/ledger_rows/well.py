"""Predict the next booking from ratios of a ledger."""

import torch
from torch import nn

torch.manual_seed(29)
rows = torch.rand(600, 6) * 90 + 10
rows[[77, 240, 241, 530], 3] = 0.0
target = (rows[:, :1] / rows[:, 1:2]).log()
rows[[240], 2] = 0.0


def ratios(batch):
    """Every column relative to the column after it."""
    return batch[:, :-1] / batch[:, 1:].clamp(min=1.0)


def train(epochs=5, size=25):
    net = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=60)
    for epoch in range(epochs):
        total = count = 0
        for idx in torch.arange(600).split(size):
            x, y = ratios(rows[idx]), target[idx]
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            loss = nn.functional.mse_loss(out.float(), y)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            if loss.isfinite():
                total, count = total + loss.item(), count + 1
        print(f"epoch {epoch}: {total / count:.4f} over {count}, {scaler.get_scale()}")


train()
