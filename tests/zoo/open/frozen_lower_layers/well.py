"""Train a classifier on frozen features, with heads that are used in turns."""

import json
import random

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self, tasks=3):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
        self.adapter = nn.Linear(64, 24)
        self.heads = nn.ModuleList(nn.Linear(24, 2) for _ in range(tasks))
        for p in self.features.parameters():
            p.requires_grad = False

    def forward(self, x, task):
        return self.heads[task](torch.relu(self.adapter(self.features(x))))


def main(steps=240):
    random.seed(1)
    torch.manual_seed(1)
    net = MultiTask()
    rules = torch.randn(3, 16)
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=4e-3
    )
    scaler = torch.amp.GradScaler("cpu")
    losses, drops = [], 0
    for step in range(steps):
        # The third task is rare.
        task = random.choices(range(3), weights=[10, 10, 1])[0]
        x = torch.randn(24, 16)
        y = (x @ rules[task] > 0).long()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x, task), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        drops += scaler.get_scale() < scale
        losses.append(loss.item())
        if step % 60 == 0:
            print(step, task, losses[-1])
    print(
        json.dumps(
            {
                "first_loss": sum(losses[:10]) / 10,
                "last_loss": sum(losses[-20:]) / 20,
                "scale": scaler.get_scale(),
                "taken": len(losses) - drops,
                "skipped": drops,
            }
        )
    )


if __name__ == "__main__":
    main()
