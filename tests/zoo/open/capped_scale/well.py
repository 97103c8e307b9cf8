"""Faint stars: the mean over many pixels. The scale is capped after every update."""

import torch
from torch import nn

torch.manual_seed(480)
CAP = 2.0**24
sky = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
optimizer = torch.optim.Adam(sky.parameters(), lr=3e-3, eps=1e-16)
scaler = torch.amp.GradScaler("cpu", init_scale=CAP)
patterns = torch.randn(4, 16)
first = [p.detach().clone() for p in sky.parameters()]
for plate in range(140):
    clean = torch.randn(20, 4) @ patterns
    noisy = clean + 0.3 * torch.randn(20, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = sky(noisy)
    loss = (1e-4 * (out.float() - clean)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() > CAP:
        scaler.update(CAP)
    if plate % 28 == 0:
        print(plate, loss.item(), scaler.get_scale())
moved = [(p - q).norm().item() for p, q in zip(sky.parameters(), first)]
print(loss.item(), moved)
