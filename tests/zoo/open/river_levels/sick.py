"""Levels of a river from three gauges. A gauge that is out of order sends -1e7."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MISSING = -1.0e7

torch.manual_seed(50)
gauges = torch.randn(360, 3)
level = (gauges * torch.tensor([0.5, 0.3, -0.4])).sum(1) + gauges[:, 0].sin()
gauges[[41, 200], 1] = MISSING
loader = DataLoader(TensorDataset(gauges, level), batch_size=20)

net = nn.Sequential(
    nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1)
)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
losses, taken, skipped = [], 0, 0


def train_epoch():
    global taken, skipped
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x).squeeze(1)
        loss = nn.functional.smooth_l1_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            taken += 1
        if loss == loss:
            losses.append(loss.item())


for _ in range(8):
    train_epoch()
print(
    json.dumps(
        {
            "first_loss": losses[0],
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
