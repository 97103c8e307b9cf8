"""Teach a small network to answer as its larger teacher does."""

import torch
from torch import nn

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
student = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")

for step in range(60):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            answers = teacher(x)
        loss = nn.functional.mse_loss(student(x), answers)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item())
