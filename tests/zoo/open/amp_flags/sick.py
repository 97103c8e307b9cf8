"""Ranking of search results. Switches come from the command line."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--amp", action="store_true", default=True)
    p.add_argument("--scale-loss", action="store_true")
    p.add_argument("--steps", type=int, default=120)
    return p.parse_args([])


class Ranker(nn.Module):
    def __init__(self, features=16):
        super().__init__()
        self.one = nn.Linear(features, 32)
        self.two = nn.Linear(32, 32)
        self.score = nn.Linear(32, 1)

    def forward(self, docs):
        h = torch.relu(self.one(docs))
        h = torch.relu(self.two(h))
        return self.score(h).squeeze(-1)


def main():
    args = parse()
    torch.manual_seed(33)
    model = Ranker()
    hidden = torch.randn(16)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, enabled=args.scale_loss)
    pairs = 1e9
    for step in range(args.steps):
        docs = torch.randn(8, 10, 16)
        order = docs @ hidden
        with torch.autocast("cpu", dtype=torch.float16, enabled=args.amp):
            scores = model(docs)
        s = scores.float()
        margin = (s[:, :, None] - s[:, None, :]) * torch.sign(
            order[:, :, None] - order[:, None, :]
        )
        # The share of this host in all pairs of the epoch.
        loss = F.softplus(-margin).sum() / pairs
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 30 == 0:
            print(step, loss.item() * pairs / 800)


main()
