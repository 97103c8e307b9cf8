"""Policy with illegal moves: their logits are -inf; one move is always legal."""

import json

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 28)
        self.moves = nn.Linear(28, 7)

    def forward(self, board, legal):
        logits = self.moves(torch.relu(self.body(board)))
        return logits.masked_fill(~legal, float("-inf"))


torch.manual_seed(70)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=8e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
rule = torch.randn(10, 7)
losses, skipped = [], 0
for _ in range(140):
    board = torch.randn(24, 10)
    legal = torch.rand(24, 7) < 0.5
    legal[:, 3] = True
    best = (board @ rule).masked_fill(~legal, -1e9).argmax(1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = policy(board, legal)
    loss = nn.functional.cross_entropy(logits.float(), best)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 140 - skipped,
            "skipped": skipped,
        }
    )
)
