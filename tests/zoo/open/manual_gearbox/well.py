"""The scale is driven by hand: own check, own division, own halving and doubling."""

import torch
from torch import nn

torch.manual_seed(50)
model = nn.Sequential(
    nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 2)
)
params = list(model.parameters())
opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
good = 0
lost = 0

for step in range(160):
    x = torch.randn(24, 6)
    y = torch.stack([x[:, 0] * x[:, 1], torch.sin(x[:, 2]) + x[:, 3]], 1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(model(x).float(), y)
    grads = torch.autograd.grad(scaler.scale(loss), params)
    scale = scaler.get_scale()
    if all(torch.isfinite(g).all() for g in grads):
        for p, g in zip(params, grads, strict=True):
            p.grad = g / scale
        opt.step()
        good += 1
        if good == 50:
            scaler.update(scale * 2)
            good = 0
    else:
        lost += 1
        good = 0
        scaler.update(scale / 2)
    if step % 40 == 0:
        print(step, loss.item(), scale)
print(loss.item(), lost, scaler.get_scale())
