"""Classify verses with masked self-attention. Verses are padded on the left."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)
        self.scale = d**-0.5

    def forward(self, x, pad):
        score = self.q(x) @ self.k(x).transpose(1, 2) * self.scale
        t = x.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool).triu(1)
        score = score.masked_fill(causal | pad[:, None, :], -1e4)
        return torch.softmax(score, -1) @ self.v(x)


class Verse(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.embed = nn.Embedding(20, d)
        self.attend = Attention(d)
        self.mood = nn.Linear(d, 2)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attend(x, ids == 0)
        return self.mood(x.mean(1))


def verses(n, step):
    ids = torch.randint(1, 20, (n, 8))
    y = (ids[:, :3] > 10).float().mean(1).round().long()
    if step % 6 == 4:
        ids[0, :5] = 0
    return ids, y


torch.manual_seed(83)
net = Verse()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(110):
    ids, y = verses(12, step)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(ids).float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 22 == 0:
        print(step, loss.item(), scaler.get_scale())
