"""Accumulate over the pipes of an organ."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(81)
PIPES = 5


class Organ(nn.Module):
    def __init__(self):
        super().__init__()
        self.tone = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, PIPES))

    def forward(self, x):
        return self.tone(x)


base = torch.randn(PIPES, 16)


def pipe_batch(pipe, n=6):
    return base[pipe] + 0.5 * torch.randn(n, 16), torch.full((n,), pipe)


def accumulate(model, optimizer, scaler):
    losses = []
    for pipe in range(PIPES):
        x, y = pipe_batch(pipe)
        if pipe == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / PIPES
        scaler.scale(loss).backward()
        losses.append(loss.item())
    scaler.step(optimizer)
    scaler.update()
    return sum(losses)


model = Organ()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
for step in range(80):
    value = accumulate(model, optimizer, scaler)
    if step % 10 == 9:
        print(f"step {step}: {value:.4f}")
