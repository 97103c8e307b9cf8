"""Accumulate over four micro-batches, with a scale that is probed often."""

import json

import torch
from torch import nn

torch.manual_seed(25)
ACCUM, VOCAB, LENGTH = 4, 20, 6


class Encoder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 2)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        # The pooled vector stays in float32.
        with torch.autocast("cpu", enabled=False):
            pooled = x.float().logsumexp(dim=1)
        return self.out(pooled)


def batches(n):
    for _ in range(n):
        ids = torch.randint(VOCAB, (8, LENGTH))
        label = (ids == 3).any(dim=1) ^ (torch.rand(8) < 0.05)
        yield ids, label.long()


encoder = Encoder()
opt = torch.optim.AdamW(encoder.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=20)
losses, window, taken, skipped = [], 0.0, 0, 0
for i, (ids, label) in enumerate(batches(ACCUM * 110), start=1):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(encoder(ids), label) / ACCUM
    scaler.scale(loss).backward()
    window += loss.item()
    if i % ACCUM:
        continue
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    if scaler.get_scale() < before:
        skipped += 1
    else:
        taken += 1
    losses.append(window)
    window = 0.0
    if len(losses) % 20 == 0:
        print(len(losses), losses[-1], scaler.get_scale())

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
