"""Baking times with a network that was cast to half precision to save memory."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(18)


def loaves(n):
    x = torch.randn(n, 6)
    return x, 1.5 * x[:, :1] - x[:, 1:2] * x[:, 2:3]


model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
nn.init.normal_(model[0].weight)
nn.init.normal_(model[2].weight, std=0.7)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(300):
    x, y = loaves(32)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = F.mse_loss(out.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 50 == 0:
        print(f"{step}: {loss.item():.4f}")
