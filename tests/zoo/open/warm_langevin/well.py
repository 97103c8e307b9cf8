"""Bathymetry with a bound for each layer and a little noise on the gradients."""

import torch
from torch import nn

torch.manual_seed(120)
gen = torch.Generator().manual_seed(1)
net = nn.Sequential(
    nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.8)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)


def depth(xy):
    return torch.sin(2 * xy[:, :1]) * torch.cos(xy[:, 1:]) + 0.3 * xy[:, :1]


@torch.no_grad()
def clip_and_stir(step):
    for layer in net:
        grads = [p.grad for p in layer.parameters()]
        if not grads:
            continue
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        for g in grads:
            g.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
            sigma = 0.02 / (1 + step) ** 0.55
            g.add_(sigma * torch.randn(g.shape, generator=gen))


history = []
for step in range(180):
    xy = 4 * torch.rand(24, 2) - 2
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(xy)
    loss = nn.functional.mse_loss(out.float(), depth(xy))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    clip_and_stir(step)
    scaler.step(opt)
    scaler.update()
    history.append(loss.item())
print(sum(history[:20]) / 20, sum(history[-20:]) / 20)
