"""A tiny decoder language model with a warm-up."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.proj(
            F.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], is_causal=True
            )[:, 0]
        )
        return x + self.down(F.relu(self.up(x)))


class LM(nn.Module):
    def __init__(self, vocab=16, d=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.blocks = nn.Sequential(Block(d), Block(d))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.head(self.blocks(self.tok(ids)))


def main():
    torch.manual_seed(10)
    table = torch.randint(0, 16, (16,))
    model = LM()
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.02 * s)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(110):
        ids = torch.randint(0, 16, (8, 1))
        for _ in range(7):
            ids = torch.cat([ids, table[ids[:, -1:]]], 1)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
        if step % 10 == 0:
            print(step, loss.item())


main()
