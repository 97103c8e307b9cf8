"""A Trainer class with clipping by value."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Trainer:
    def __init__(self, model, lr, clip):
        self.model = model
        self.clip = clip
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")
        self.history = []

    def training_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(x)
            loss = F.cross_entropy(logits, y)
        return loss

    def optimize(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def fit(self, batches):
        for step, (x, y) in enumerate(batches):
            loss = self.training_step(x, y)
            self.optimize(loss)
            self.history.append(loss.item())
            if step % 25 == 0:
                print(step, f"{loss.item():.4f}", self.scaler.get_scale())


def ships(n, batch_size=20):
    g = torch.Generator().manual_seed(3)
    rigs = torch.randn(6, 14, generator=g)
    for _ in range(n):
        y = torch.randint(0, 6, (batch_size,), generator=g)
        yield rigs[y] + torch.randn(batch_size, 14, generator=g), y


torch.manual_seed(18)
net = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Linear(32, 6))
Trainer(net, lr=0.05, clip=0.5).fit(ships(150))
