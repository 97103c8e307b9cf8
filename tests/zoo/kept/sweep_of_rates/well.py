"""A small sweep over learning rate and width, all in one process."""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F

teacher = torch.randn(10, 1, generator=torch.Generator().manual_seed(1))


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return x, torch.tanh(x @ teacher) + 0.1 * torch.randn(n, 1, generator=g)


def train(config):
    torch.manual_seed(0)
    width = config["width"]
    model = nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    scaler = torch.amp.GradScaler("cpu")
    x, y = data(160, seed=5)
    for _ in range(4):
        for idx in torch.randperm(160).split(16):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(x[idx]).float(), y[idx])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        xv, yv = data(80, seed=6)
        return F.mse_loss(model(xv), yv).item()


results = []
for lr, width in itertools.product([1e-3, 3e-3, 1e-2], [8, 32]):
    score = train({"lr": lr, "width": width})
    results.append((score, lr, width))
    print(f"lr {lr:g} width {width} val {score:.4f}")
print("best", min(results))
