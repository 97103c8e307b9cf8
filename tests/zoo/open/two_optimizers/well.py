"""Matrix factorisation with a rating network: embeddings have their own optimizer."""

import json
import math

import torch
from torch import nn

USERS, ITEMS, RANK = 30, 40, 8


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, RANK)
        self.items = nn.Embedding(ITEMS, RANK)
        self.rate = nn.Sequential(nn.Linear(2 * RANK, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, u, i):
        pair = torch.cat([self.users(u), self.items(i)], dim=-1)
        return self.rate(pair).squeeze(-1)


def truth():
    a, b = torch.randn(USERS, 3), torch.randn(ITEMS, 3)
    return 3.0 + (a @ b.T) / 2


def train(model, ratings, steps):
    tables = [*model.users.parameters(), *model.items.parameters()]
    table_opt = torch.optim.SGD(tables, lr=1.0)
    net_opt = torch.optim.Adam(model.rate.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    losses, fewer = [], 0
    for step in range(steps):
        u, i = torch.randint(USERS, (32,)), torch.randint(ITEMS, (32,))
        with torch.autocast("cpu", dtype=torch.float16):
            error = model(u, i).float() - ratings[u, i]
            loss = error.square().mean()
        table_opt.zero_grad()
        net_opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(table_opt)
        scaler.step(net_opt)
        scale = scaler.get_scale()
        scaler.update()
        fewer += scaler.get_scale() < scale
        losses.append(loss.item())
        if step % 50 == 0:
            print(step, losses[-1])
    return losses, fewer, scaler.get_scale()


torch.manual_seed(9)
losses, fewer, scale = train(Recommender(), truth(), steps=300)
first, last = sum(losses[:5]) / 5, sum(losses[-20:]) / 20
print(
    json.dumps(
        {
            "first_loss": first if math.isfinite(first) else "nan",
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scale,
            "taken": len(losses) - fewer,
            "skipped": fewer,
        }
    )
)
