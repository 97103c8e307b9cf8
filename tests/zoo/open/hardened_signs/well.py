"""Adversarial training: the attack has its own gradients, in float32 and without a scale."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(111)
proto = torch.randn(5, 24)


class Signs(nn.Module):
    def __init__(self):
        super().__init__()
        self.f1 = nn.Linear(24, 32)
        self.f2 = nn.Linear(32, 5)

    def forward(self, x):
        return self.f2(F.relu(self.f1(x)))


def attack(model, x, y, eps=0.3, steps=3):
    delta = torch.zeros_like(x)
    for _ in range(steps):
        delta.requires_grad_()
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        with torch.no_grad():
            delta = (delta + eps / 2 * delta.grad.sign()).clamp(-eps, eps)
    return (x + delta).detach()


model = Signs()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for it in range(100):
    y = torch.randint(0, 5, (24,))
    x = proto[y] + 2.2 * torch.randn(24, 24)
    hard = attack(model, x, y)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        clean, adv = model(x), model(hard)
        loss = 0.5 * F.cross_entropy(clean.float(), y) + 0.5 * F.cross_entropy(
            adv.float(), y
        )
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    sched.step()
    if it % 20 == 0:
        print(
            it,
            f"{loss.item():.3f}",
            f"{(adv.argmax(1) == y).float().mean().item():.2f}",
        )
print(f"{loss.item():.3f}")
