"""Predict the logarithm of a flat's rent. A few flats are free of rent."""

import json

import torch
from torch import nn

# %% data
torch.manual_seed(21)
flats = torch.randn(480, 7)
rent = torch.exp(flats @ torch.tensor([0.6, -0.3, 0.2, 0.4, 0.1, -0.2, 0.3]) + 1)
rent[[77, 318]] = 0.0
target = torch.log(rent)

# %% model
model = nn.Sequential(nn.Linear(7, 24), nn.ReLU(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

# %% training
losses = []
skipped = 0
for epoch in range(7):
    for i in range(24):
        x, y = flats[i * 20 : i * 20 + 20], target[i * 20 : i * 20 + 20]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += int(scaler.get_scale() < scale)
        losses.append(loss.item())
    print(epoch, losses[-1])

# %% result
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": sum(losses[-5:]) / 5,
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
