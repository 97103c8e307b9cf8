"""Clipping done by hand, on unscaled gradients, to a tight bound that always binds."""

import torch
from torch import nn


class Careful:
    def __init__(self, model, lr, bound):
        self.model, self.bound = model, bound
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")

    def clip(self):
        inverse = 1.0 / self.scaler.get_scale()
        total = sum(
            (p.grad * inverse).pow(2).sum() for p in self.model.parameters()
        ).sqrt()
        factor = (self.bound / (total + 1e-6)).clamp(max=1.0)
        for p in self.model.parameters():
            p.grad.mul_(factor)
        return total

    def __call__(self, loss):
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        total = self.clip()
        self.scaler.step(self.opt)
        self.scaler.update()
        return total.item()


torch.manual_seed(105)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
target = torch.randn(12, 4)
trainer = Careful(model, lr=0.2, bound=0.1)
for it in range(140):
    x = torch.randn(20, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = (out.float() - torch.tanh(x @ target)).square().mean()
    norm = trainer(loss)
    if it % 20 == 0:
        print(f"{it} loss {loss.item():.4f} norm {norm:.3f}")
