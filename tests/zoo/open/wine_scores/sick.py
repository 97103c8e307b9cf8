"""Regress a wine's score on its chemistry (tabular, residual MLP)."""

import json

import torch
import torch.nn.functional as F
from torch import nn


class ResMLP(nn.Module):
    def __init__(self, d_in, width=24, depth=3):
        super().__init__()
        self.embed = nn.Linear(d_in, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(layer(norm(x)))
        return self.score(x).flatten()


def main():
    torch.manual_seed(12)
    coef = torch.randn(11)
    table = torch.randn(400, 11)
    score = table @ coef + torch.sin(2 * table[:, 0])

    net = ResMLP(11)
    optim = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=2.0**10,
        growth_factor=64.0,
        growth_interval=5,
    )
    log, skips = [], 0
    for epoch in range(12):
        for rows in torch.randperm(400).split(40):
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(table[rows])
                loss = F.mse_loss(out, score[rows])
            optim.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optim)
            was = scaler.get_scale()
            scaler.update()
            skips += int(scaler.get_scale() < was)
            log.append(loss.item())
        print(epoch, sum(log[-10:]) / 10)
    return {
        "first_loss": sum(log[:5]) / 5,
        "last_loss": sum(log[-10:]) / 10,
        "scale": scaler.get_scale(),
        "taken": len(log) - skips,
        "skipped": skips,
    }


if __name__ == "__main__":
    print(json.dumps(main()))
