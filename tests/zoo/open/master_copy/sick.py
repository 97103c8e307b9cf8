"""Half-precision weights with float32 masters, by hand as in the old days."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(27)
net = nn.Sequential(
    nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)
).half()
for p in net.parameters():
    p.data = (
        torch.where(torch.rand(p.shape) < 0.5, -0.6, 0.6) + 0.1 * torch.randn(p.shape)
    ).half()
masters = [p.detach().clone().float().requires_grad_() for p in net.parameters()]
opt = torch.optim.Adam(masters, lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)


def before_step():
    for master, p in zip(masters, net.parameters()):
        master.data.copy_(p.data)
        master.grad = p.grad.float()
        p.grad = None


def after_step():
    for master, p in zip(masters, net.parameters()):
        p.data.copy_(master.data)


centres = torch.randn(3, 10)
for step in range(600):
    y = torch.randint(0, 3, (24,))
    x = 0.3 * (centres[y] + 0.5 * torch.randn(24, 10))
    loss = F.cross_entropy(net(x.half()).float(), y)
    scaler.scale(loss).backward()
    before_step()
    scaler.step(opt)
    scaler.update()
    after_step()
    if step % 100 == 0:
        print(f"{step:4d} {loss.item():.4f}")
