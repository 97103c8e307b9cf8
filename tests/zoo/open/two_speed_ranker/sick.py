"""Rank films: embeddings and the scorer have an optimizer each."""

import json
import math

import torch
from torch import nn

USERS, FILMS = 60, 40


class Ranker(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.users = nn.Embedding(USERS, dim)
        self.films = nn.Embedding(FILMS, dim)
        self.scorer = nn.Sequential(nn.Linear(2 * dim, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, user, film):
        pair = torch.cat([self.users(user), self.films(film)], dim=-1)
        return self.scorer(pair)[:, 0]


torch.manual_seed(103)
taste, style = torch.randn(USERS), torch.randn(FILMS)
ranker = Ranker()
embedding_params = [*ranker.users.parameters(), *ranker.films.parameters()]
opt_embedding = torch.optim.SGD(embedding_params, lr=1.0, momentum=0.9)
opt_scorer = torch.optim.Adam(ranker.scorer.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

losses = []
taken, skipped = 0, 0
for _ in range(220):
    user, film = torch.randint(USERS, (32,)), torch.randint(FILMS, (32,))
    rating = torch.tanh(taste[user] + style[film])
    opt_embedding.zero_grad()
    opt_scorer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        score = ranker(user, film)
    loss = nn.functional.mse_loss(score.float(), rating)
    scaler.scale(loss).backward()
    scaler.step(opt_scorer)
    opt_embedding.step()
    previous = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < previous:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-20:]) / 20
print(
    json.dumps(
        {
            "first_loss": first if math.isfinite(first) else "nan",
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
