"""Homeostasis: every 25 steps units are scaled towards a firing rate of 30 %."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class FiringNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 24)
        self.out = nn.Linear(24, 4)
        self.register_buffer("fired", torch.zeros(24))
        self.seen = 0

    def forward(self, x):
        h = F.relu(self.hidden(x))
        self.fired += (h > 0).float().sum(0)
        self.seen += len(x)
        return self.out(h)

    @torch.no_grad()
    def balance(self, target=0.3):
        rate = (self.fired / self.seen).clamp(min=0.15)
        self.hidden.weight.mul_((target / rate)[:, None])
        self.hidden.bias.mul_(target / rate)
        self.fired.zero_()
        self.seen = 0


torch.manual_seed(68)
centres = torch.randn(4, 8)
model = FiringNet()
with torch.no_grad():
    # A few units that start silent.
    model.hidden.bias[:3] = -8.0
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(1, 111):
    y = torch.randint(0, 4, (24,))
    x = centres[y] + 0.8 * torch.randn(24, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 25 == 0:
        model.balance()
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())
