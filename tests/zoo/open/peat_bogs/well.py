"""Regress carbon stock from soil cores (plain loop, SGD)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(14)
cores = torch.randn(320, 12)
stock = cores[:, :4].prod(1, keepdim=True).tanh() + cores[:, 4:6].sum(1, keepdim=True)
loader = DataLoader(TensorDataset(cores, stock), batch_size=20, shuffle=True)

model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
mse = nn.MSELoss()

for epoch in range(8):
    epoch_loss = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = mse(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        epoch_loss += loss.item()
    print(f"epoch {epoch}: mse {epoch_loss / len(loader):.4f}")
