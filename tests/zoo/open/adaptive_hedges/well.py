"""Hedge heights; gradients are bounded by the size of the weights."""

import torch
from torch import nn

torch.manual_seed(491)


def bound_by_weights(params, factor=0.05):
    for p in params:
        limit = factor * p.detach().norm().clamp(min=1e-2)
        norm = p.grad.norm()
        if norm > limit:
            p.grad.mul_(limit / norm)


hedge = nn.Sequential(
    nn.Linear(7, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1)
)
optimizer = torch.optim.SGD(hedge.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
growth = torch.randn(7, 1) / 2
for week in range(160):
    x = torch.randn(20, 7)
    y = (x @ growth).relu() + 0.05 * torch.randn(20, 1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(hedge(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    bound_by_weights(hedge.parameters())
    scaler.step(optimizer)
    scaler.update()
    if week % 32 == 0 or week == 159:
        print(week, loss.item())
