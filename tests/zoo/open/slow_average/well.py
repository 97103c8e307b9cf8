"""Train with a slow copy of the weights (Lookahead) that is written back."""

import torch
from torch import nn


class Slow:
    """Debiased average of the weights since the last write-back."""

    def __init__(self, model, decay=0.8):
        self.model, self.decay = model, decay
        self.reset()

    def reset(self):
        self.count = 0
        self.mean = [torch.zeros_like(p) for p in self.model.parameters()]

    @torch.no_grad()
    def add(self):
        self.count += 1
        for m, p in zip(self.mean, self.model.parameters(), strict=True):
            m.mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def write_back(self):
        correction = torch.tensor(1 - self.decay**self.count)
        for m, p in zip(self.mean, self.model.parameters(), strict=True):
            p.copy_(m / correction)


torch.manual_seed(53)
model = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
slow = Slow(model)
for step in range(1, 121):
    x = torch.randn(24, 6)
    y = x[:, :1].abs() + x[:, 1:2]
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    slow.add()
    if step % 40 == 0:
        slow.write_back()
        slow.reset()
        print(step, loss.item())
