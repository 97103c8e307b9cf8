"""Ship counts per hour. The gradient norm goes to the log in true units."""

import math

import torch
from torch import nn


def counts(n, g):
    hour = torch.rand(n, 1, generator=g) * 24
    day = torch.randint(0, 7, (n, 1), generator=g)
    mean = 3 + 2 * torch.sin(hour / 24 * 2 * math.pi) - (day > 4).float()
    x = torch.cat(
        [torch.sin(hour * math.pi / 12), torch.cos(hour * math.pi / 12), day / 6.0], 1
    )
    return x, mean + 0.3 * torch.randn(n, 1, generator=g)


def true_norm(parameters, scale):
    total = 0.0
    for p in parameters:
        total += (p.grad.data.norm().item() / scale) ** 2
    return math.sqrt(total)


def main():
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(20)
    model = nn.Sequential(
        nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    norms = []
    for step in range(150):
        x, y = counts(32, g)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss = nn.functional.smooth_l1_loss(out.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        norms.append(true_norm(model.parameters(), scaler.get_scale()))
        scaler.step(opt)
        scaler.update()
        if step % 30 == 0:
            print(f"{step:4d} loss {loss.item():.4f} norm {norms[-1]:.4f}")


main()
