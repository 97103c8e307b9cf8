"""A small transformer that continues a chain of letters."""

import json
import math

import torch
from torch import nn

VOCAB, CONTEXT, WIDTH = 16, 12, 32
WARMUP = 40


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(WIDTH, VOCAB)
        mask = torch.full((CONTEXT, CONTEXT), -1e4).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, tokens):
        h = self.tok(tokens) + self.pos
        return self.lm_head(self.layers(h, mask=self.mask))


def chains(n):
    start = torch.randint(VOCAB, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    return (start + stride * torch.arange(CONTEXT + 1)) % VOCAB


def schedule(step):
    return min(step + 1, WARMUP)


torch.manual_seed(101)
lm = Decoder()
opt = torch.optim.AdamW(lm.parameters(), lr=5e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)

losses = []
taken = skipped = 0
for _ in range(110):
    text = chains(8)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = lm(text[:, :-1])
    loss = nn.functional.cross_entropy(
        logits.float().reshape(-1, VOCAB), text[:, 1:].reshape(-1)
    )
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    sched.step()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    losses.append(loss.item())

ends = [sum(losses[:8]) / 8, sum(losses[-8:]) / 8]
first, last = ("nan" if math.isnan(e) else e for e in ends)
print(
    json.dumps(
        {
            "first_loss": first,
            "last_loss": last,
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
