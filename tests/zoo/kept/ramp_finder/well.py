"""LR range test as in fastai, then one-cycle training from the same start."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)
proto = torch.randn(4, 12)


def batch(n=24):
    y = torch.randint(0, 4, (n,))
    return proto[y] + 1.2 * torch.randn(n, 12), y


def train_step(model, optimizer, scaler):
    x, y = batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def find_lr(model, low=1e-4, high=10.0, steps=60, beta=0.9):
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=low, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    average, best, best_lr, lr = 0.0, float("inf"), low, low
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = train_step(model, optimizer, scaler)
        average = beta * average + (1 - beta) * loss
        smooth = average / (1 - beta ** (i + 1))
        if i > 5 and smooth > 2 * best:
            break
        if smooth < best:
            best, best_lr = smooth, lr
        lr *= (high / low) ** (1 / (steps - 1))
    model.load_state_dict(state)
    print(f"stopped at lr {lr:.3g}, best {best_lr:.3g}")
    return best_lr / 10


model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
lr = find_lr(model)
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
total = 100
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=lr, total_steps=total + 1
)
scaler = torch.amp.GradScaler("cpu")
for step in range(total):
    loss = train_step(model, optimizer, scaler)
    schedule.step()
    if step % 20 == 0:
        print(step, f"{loss:.4f}")
