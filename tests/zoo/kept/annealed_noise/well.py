"""Annealed gradient noise (Neelakantan et al.), and clipping by value."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)


def parity(n):
    bits = torch.randint(0, 2, (n, 5)).float()
    return bits * 2 - 1, bits[:, :2].sum(1).long() % 2


model = nn.Sequential(
    nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
eta, gamma, clip = 0.01, 0.55, 0.5
for t in range(160):
    x, y = parity(24)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), clip)
    sigma = (eta / (1 + t) ** gamma) ** 0.5
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=sigma)
    scaler.step(optimizer)
    scaler.update()
    if t % 25 == 0:
        print(t, f"loss {loss.item():.4f} sigma {sigma:.4f}")
