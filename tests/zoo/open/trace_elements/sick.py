"""A residual branch of trace elements, whose share is 2e-7."""

import torch
import torch.nn.functional as F
from torch import nn


class Branch(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc1 = nn.Linear(d, 2 * d)
        self.fc2 = nn.Linear(2 * d, d)
        self.register_buffer("gain", torch.full((d,), 2e-7))

    def forward(self, x):
        return self.gain * self.fc2(F.gelu(self.fc1(x)))


class Ponds(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.stem = nn.Linear(10, d)
        self.branch = Branch(d)
        self.head = nn.Linear(d, 4)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.branch(x)
        return self.head(x)


torch.manual_seed(88)
ponds = torch.randn(4, 10)
model = Ponds()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**7)
for step in range(120):
    y = torch.randint(0, 4, (16,))
    x = ponds[y] + torch.randn(16, 10)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item())
