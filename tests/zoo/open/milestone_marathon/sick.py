"""Running times; the rate changes at milestones."""

import torch
from torch import nn

torch.manual_seed(451)
shape = torch.randn(8, 2) / 2
model = nn.Sequential(
    nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [60, 90], gamma=10)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for km in range(150):
    x = torch.randn(24, 8)
    y = (x @ shape) * (1 + x[:, :1].tanh())
    with torch.autocast("cpu", dtype=torch.float16):
        time = model(x)
    loss = nn.functional.mse_loss(time.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if km % 15 == 0:
        print(km, loss.item(), scaler.get_scale())
print(loss.item())
