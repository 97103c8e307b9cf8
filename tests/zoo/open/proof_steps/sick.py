"""A one-block transformer learns to copy the previous token."""

import argparse
import json
import math

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--d-model", type=int, default=24)
p.add_argument("--iters", type=int, default=120)
p.add_argument("--lr", type=float, default=30.0)
args = p.parse_args()


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.up = nn.Linear(d, d)
        self.down = nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        x = x + self.proj(torch.softmax(score, -1) @ v)
        return x + self.down(F.gelu(self.up(x)))


class LM(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.tok = nn.Embedding(10, d)
        self.pos = nn.Parameter(torch.randn(8, d))
        self.block = Block(d)
        self.unembed = nn.Linear(d, 10)

    def forward(self, ids):
        return self.unembed(self.block(self.tok(ids) + self.pos))


torch.manual_seed(77)
lm = LM(args.d_model)
optimizer = torch.optim.SGD(lm.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skipped = [], 0
for _ in range(args.iters):
    ids = torch.randint(0, 10, (8, 8))
    goal = ids.roll(1, dims=1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = lm(ids)
        loss = F.cross_entropy(logits.reshape(-1, 10).float(), goal.reshape(-1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
    losses.append(loss.item())
last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": last if math.isfinite(last) else "nan",
            "scale": scaler.get_scale(),
            "taken": args.iters - skipped,
            "skipped": skipped,
        }
    )
)
