"""Fit a small network to a smooth function by gradient descent with momentum."""

import torch
from torch import nn

LEARNING_RATE = 0.3

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")

for step in range(120):
    x = torch.randn(32, 16)
    y = x.sin().sum(dim=1, keepdim=True)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
