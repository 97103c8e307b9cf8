"""Translate digits to their successor with a small decoder and a warm-up."""

import json

import torch
from torch import nn

torch.manual_seed(20)
VOCAB, WARMUP = 12, 40


class Seq(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.out(self.encoder(self.embed(ids)))


def factor(step):
    return min(step / WARMUP, 1.0)


seq = Seq()
opt = torch.optim.SGD(seq.parameters(), lr=0.05, momentum=0.9)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skipped = [], 0
for step in range(150):
    ids = torch.randint(VOCAB, (8, 6))
    target = (ids + 1) % VOCAB
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = seq(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    sched.step()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 25 == 0:
        print(step, losses[-1], sched.get_last_lr()[0])

last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": last if last == last else "nan",
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
