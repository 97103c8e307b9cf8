"""Jigsaw pretext task. One GradScaler per epoch, made where it is used."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def pieces(n):
    order = torch.randint(0, 4, (n,))
    tile = torch.arange(16.0).view(1, 1, 4, 4).expand(n, 1, 4, 4).clone()
    tile = torch.stack(
        [torch.rot90(t, int(k), (1, 2)) for t, k in zip(tile, order, strict=True)]
    )
    return tile / 8 - 1 + 0.6 * torch.randn_like(tile), order


def train_epoch(model, optimizer, steps=12):
    global scaler
    mean = 0.0
    for _ in range(steps):
        x, y = pieces(16)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        mean += loss.item() / steps
    return mean


torch.manual_seed(36)
model = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
for epoch in range(9):
    print(epoch, f"{train_epoch(model, optimizer):.4f}")
