"""Echo counts of meteors: a shower in a few nights, and a scale that grows every 20 steps."""

import torch
from torch import nn

torch.manual_seed(210)
SHOWERS = {47, 101, 163}


class Watch(nn.Module):
    def __init__(self):
        super().__init__()
        self.sky = nn.Linear(6, 24)
        self.rate = nn.Linear(24, 1)

    def forward(self, x):
        return self.rate(torch.relu(self.sky(x)))


w = torch.randn(6, 1)
watch = Watch()
optimizer = torch.optim.Adam(watch.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler(
    "cpu", init_scale=2.0**10, growth_factor=1.5, growth_interval=20
)
losses = []
for night in range(200):
    x = torch.randn(20, 6)
    y = (x @ w).abs() + 0.1 * torch.randn(20, 1)
    if night in SHOWERS:
        y[:3] += 3000 * torch.rand(3, 1) + 3000
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        rate = watch(x)
    loss = nn.functional.mse_loss(rate.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(watch.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(losses[0], losses[-1], max(losses), scaler.get_scale())
