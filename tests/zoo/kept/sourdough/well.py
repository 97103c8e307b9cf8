"""Predict the rise of a dough; the norm of the gradients is watched and clipped."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(33)


class Dough(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(7, 32)
        self.rest = nn.Linear(32, 32)
        self.rise = nn.Linear(32, 1)

    def forward(self, x):
        return self.rise(F.relu(self.rest(F.relu(self.mix(x)))))


def loaves(n):
    x = torch.rand(n, 7)
    return x, 2 * torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:3]


def unscale(scaler, optimizer):
    scaler.unscale_(optimizer)


model = Dough()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(150):
    x, y = loaves(24)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = F.mse_loss(pred.float(), y)
    scaler.scale(loss).backward()
    unscale(scaler, optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 25 == 0:
        print(step, f"loss {loss.item():.4f} norm {norm.item():.4f}")
