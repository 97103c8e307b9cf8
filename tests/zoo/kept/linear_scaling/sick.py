"""Large-batch SGD with the linear scaling rule of Goyal et al."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(41)
batch_size, accumulate = 32, 2
base_lr = 0.2
lr = base_lr * batch_size * accumulate

model = nn.Sequential(
    nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
w = torch.randn(10, 1) / 3
for step in range(100):
    optimizer.zero_grad()
    mean = 0.0
    for _ in range(accumulate):
        x = torch.randn(batch_size, 10)
        y = torch.sin(x @ w)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y) / accumulate
        scaler.scale(loss).backward()
        mean += loss.item()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, mean, scaler.get_scale())
