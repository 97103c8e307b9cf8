"""SWA in the last third, statistics of BatchNorm afterwards, norms in a log."""

import csv

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

torch.manual_seed(36)
x = torch.randn(192, 10)
y = ((x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()) % 3
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(x, y), batch_size=24, shuffle=True
)
model = nn.Sequential(
    nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)
)
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa_scheduler = SWALR(optimizer, swa_lr=0.03, anneal_epochs=2)
scaler = torch.amp.GradScaler("cpu")


def grad_norms(model):
    return {n: p.grad.norm().item() for n, p in model.named_parameters()}


with open("norms.csv", "w", newline="") as file:
    log = None
    for epoch in range(15):
        for xb, yb in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(xb), yb)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            row = grad_norms(model)
            if log is None:
                log = csv.DictWriter(file, row)
                log.writeheader()
            log.writerow(row)
            scaler.step(optimizer)
            scaler.update()
        if epoch >= 10:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        print(epoch, f"{loss.item():.4f}", f"{sum(row.values()):.3f}")
update_bn(loader, swa_model)
swa_model.eval()
with torch.no_grad():
    print("swa acc", (swa_model(x).argmax(1) == y).float().mean().item())
