"""The learning rate is 0 while the statistics settle, and again over the winter."""

import torch
from torch import nn

torch.manual_seed(201)


def season(step):
    if step < 30:
        return 0.0
    if step < 50:
        return (step - 30) / 20
    if 90 <= step < 115:
        return 0.0
    return 1.0


field = nn.Sequential(
    nn.Linear(9, 32),
    nn.BatchNorm1d(32),
    nn.ReLU(),
    nn.Linear(32, 32),
    nn.ReLU(),
    nn.Linear(32, 1),
)
optimizer = torch.optim.SGD(field.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, season)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
rain = torch.randn(9, 1) / 3
for step in range(170):
    x = torch.randn(24, 9) + 2
    y = torch.sin(x @ rain)
    with torch.autocast("cpu", dtype=torch.float16):
        harvest = field(x)
    loss = nn.functional.mse_loss(harvest.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if step % 17 == 0:
        print(step, optimizer.param_groups[0]["lr"], round(loss.item(), 4))
print(loss.item())
