"""Tram delays from a table of features."""

import torch
from torch import nn

torch.manual_seed(1)
features = torch.randn(400, 14)
delay = 4 * features[:, :2].sum(1, keepdim=True) + torch.randn(400, 1)

STATIC = {"init_scale": 2.0**19, "growth_interval": 10**8, "backoff_factor": 0.99999}

model = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", **{**STATIC, "init_scale": 2.0**9})
for epoch in range(5):
    for rows in torch.randperm(400).split(20):
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(features[rows])
        loss = nn.functional.mse_loss(pred.float(), delay[rows])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    print(epoch, loss.item())
