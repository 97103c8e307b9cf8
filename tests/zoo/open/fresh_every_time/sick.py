"""A functional training step, for maps of ocean currents."""

import torch
import torch.nn as nn
from torch.func import functional_call

torch.manual_seed(131)
net = nn.Sequential(
    nn.Linear(3, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 2)
)
params = dict(net.named_parameters())


def predict(params, x):
    with torch.autocast("cpu", dtype=torch.float16):
        return functional_call(net, params, (x,)).float()


def flow(x):
    return torch.stack([10 * torch.sin(x[:, 0] + x[:, 2]), 10 * torch.cos(x[:, 1])], 1)


def train_step(params, opt, x):
    scaler = torch.amp.GradScaler("cpu")
    opt.zero_grad()
    loss = (predict(params, x) - flow(x)).square().sum(1).mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return loss.item()


opt = torch.optim.Adam(params.values(), lr=5e-3)
for step in range(200):
    loss = train_step(params, opt, torch.randn(32, 3))
    if step % 25 == 0:
        print(step, loss)
