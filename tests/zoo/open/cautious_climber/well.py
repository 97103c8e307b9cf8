"""Keeps a copy of the best weights, and goes back to it with half the rate if it got lost."""

import copy

import torch
from torch import nn

torch.manual_seed(242)
rock = torch.randn(12, 1) / 3


def wall(n):
    x = torch.randn(n, 12)
    return x, torch.sin(3 * x @ rock) + 0.2 * torch.randn(n, 1)


model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
check = wall(64)
best, score = None, float("inf")

for step in range(1, 201):
    x, y = wall(12)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x).float() - y).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10:
        continue
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        now = (model(check[0]).float() - check[1]).square().mean().item()
    if now < score:
        best, score = copy.deepcopy((model.state_dict(), optimizer.state_dict())), now
    elif now > 1.03 * score:
        model.load_state_dict(best[0])
        optimizer.load_state_dict(best[1])
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        print("back at", step, "rate", optimizer.param_groups[0]["lr"], now, ">", score)
print("best", score)
