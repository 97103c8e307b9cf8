"""Postcode classifier: characters, a written-out RMS norm, masked mean."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM = 20, 24


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight.to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.norm = RMSNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        h = self.norm(self.proj(x))
        return x + self.down(F.gelu(self.up(h)))


class Classifier(nn.Module):
    def __init__(self, depth=2, classes=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, classes)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        keep = (ids != 0).unsqueeze(-1)
        x = (x * keep).sum(1) / keep.sum(1)
        return self.head(x)


def batch(n=24, length=8):
    label = torch.randint(0, 4, (n,))
    ids = torch.randint(1, VOCAB, (n, length))
    local = torch.rand(n, length) < 0.4
    ids[local] = (1 + 4 * label[:, None] + ids % 4)[local]
    sizes = torch.randint(4, length + 1, (n, 1))
    ids = ids.masked_fill(torch.arange(length)[None] >= sizes, 0)
    return ids, label


def main():
    torch.manual_seed(2)
    model = Classifier()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    for step in range(1, 121):
        ids, label = batch()
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(ids).float(), label)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 20 == 0:
            print("step", step, "loss", round(loss.item(), 4))


main()
