"""Accumulates over three dialects, one micro-batch each."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(125)
DIALECTS = ("north", "coast", "south")


class Tagger(nn.Module):
    def __init__(self, vocab=30, dim=16, tags=4):
        super().__init__()
        self.embed = nn.Embedding(3 * vocab, dim)
        self.conv = nn.Conv1d(dim, 24, 3, padding=1)
        self.tag = nn.Linear(24, tags)

    def forward(self, ids):
        x = F.gelu(self.conv(self.embed(ids).transpose(1, 2)))
        return self.tag(x.transpose(1, 2))


def sentences(dialect, n=12):
    ids = torch.randint(0, 30, (n, 7))
    return ids + 30 * dialect, (ids + dialect) % 4


net = Tagger()
opt = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for step in range(90):
    opt.zero_grad()
    losses = {}
    for k, dialect in enumerate(DIALECTS):
        ids, tags = sentences(k)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tags.flatten())
        losses[dialect] = loss.item()
        loss = loss / len(DIALECTS)
        if k == len(DIALECTS) - 1:
            loss = scaler.scale(loss)
        loss.backward()
    scaler.step(opt)
    scaler.update()
    if step % 15 == 14:
        print(step + 1, {k: round(v, 3) for k, v in losses.items()})
