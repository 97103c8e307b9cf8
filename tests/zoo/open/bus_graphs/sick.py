"""Message passing on small road graphs; a graph's input is centred on its stops."""

import json
import random

import torch
from torch import nn


def road(seed):
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    nodes = 6
    feats = torch.randn(nodes, 4, generator=gen)
    adj = torch.eye(nodes)
    for a in range(nodes):
        b = rng.randrange(nodes)
        adj[a, b] = adj[b, a] = 1
    # Some roads have no bus stop.
    stops = [n for n in range(nodes) if rng.random() < 0.5]
    load = (adj / adj.sum(1, keepdim=True) @ feats).tanh().sum()
    centre = feats[stops].mean(0)
    return torch.cat([feats, (feats - centre)], dim=1), adj, load


class Layer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.own = nn.Linear(i, o)
        self.near = nn.Linear(i, o)

    def forward(self, h, adj):
        return torch.relu(self.own(h) + self.near(adj @ h / adj.sum(-1, True)))


class RoadNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.g1 = Layer(8, 16)
        self.g2 = Layer(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, h, adj):
        return self.out(self.g2(self.g1(h, adj), adj)).sum((1, 2))


torch.manual_seed(0)
roads = [road(seed) for seed in range(192)]
net = RoadNet()
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
curve, skips = [], 0
for _epoch in range(11):
    for lo in range(0, 192, 16):
        h, adj, y = (
            torch.stack(part) for part in zip(*roads[lo : lo + 16], strict=True)
        )
        with torch.autocast("cpu", dtype=torch.float16):
            y_hat = net(h, adj)
        loss = nn.functional.l1_loss(y_hat.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        s = scaler.get_scale()
        scaler.update()
        skips += scaler.get_scale() < s
        if loss.isfinite():
            curve.append(loss.item())

print(
    json.dumps(
        {
            "first_loss": sum(curve[:8]) / 8,
            "last_loss": sum(curve[-8:]) / 8,
            "scale": scaler.get_scale(),
            "taken": 132 - skips,
            "skipped": skips,
        }
    )
)
