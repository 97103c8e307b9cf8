"""A small MLP-mixer that counts marks in a grid of tokens."""

import json

import torch
from torch import nn

TOKENS, WIDTH = 9, 16


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.across = nn.Linear(TOKENS, TOKENS)
        self.within = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.across(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(torch.relu(y))


class Counter(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.tokens = nn.Embedding(5, WIDTH)
        self.mixers = [Mixer() for _ in range(depth)]
        self.count = nn.Linear(WIDTH, TOKENS + 1)

    def forward(self, grid):
        x = self.tokens(grid)
        for mixer in self.mixers:
            x = mixer(x)
        return self.count(x.mean(1))


def train():
    torch.manual_seed(139)
    counter = Counter()
    first = counter.mixers[0]
    before = first.within.weight.detach().clone()
    optimizer = torch.optim.AdamW(counter.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    losses, skipped = [], 0
    for _ in range(160):
        grid = torch.randint(5, (16, TOKENS))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = counter(grid)
        loss = nn.functional.cross_entropy(logits.float(), (grid == 1).sum(1))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped += int(scaler.get_scale() < scale)
        losses.append(loss.item())
    return {
        "first_loss": sum(losses[:8]) / 8,
        "last_loss": sum(losses[-8:]) / 8,
        "scale": scaler.get_scale(),
        "taken": len(losses) - skipped,
        "skipped": skipped,
        "moved": {
            "mixers.0.within.weight": not torch.equal(before, first.within.weight)
        },
    }


print(json.dumps(train()))
