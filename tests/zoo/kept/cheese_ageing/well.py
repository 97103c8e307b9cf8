"""Regression with ReduceLROnPlateau, early stopping, and the best weights restored."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(55)
x = torch.randn(140, 6)
y = (x[:, :2].prod(1) + 0.5 * x[:, 2] + 0.3 * torch.randn(140)).unsqueeze(1)
x_train, y_train, x_val, y_val = x[:100], y[:100], x[100:], y[100:]

model = nn.Sequential(
    nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
scaler = torch.amp.GradScaler("cpu")

best, best_state, bad_epochs, patience = float("inf"), None, 0, 8
for epoch in range(60):
    model.train()
    for idx in torch.randperm(100).split(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x_train[idx]).float(), y_train[idx])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        val = F.mse_loss(model(x_val).float(), y_val).item()
    scheduler.step(val)
    if val < best - 1e-4:
        best, best_state, bad_epochs = val, copy.deepcopy(model.state_dict()), 0
    else:
        bad_epochs += 1
        if bad_epochs >= patience:
            print(f"early stop at epoch {epoch}")
            break
    if epoch % 5 == 0:
        print(f"{epoch} train {loss.item():.4f} val {val:.4f}")
model.load_state_dict(best_state)
print(f"best val {best:.4f}")
