"""A causal transformer copies what it saw three symbols ago."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(147)


class Causal(nn.Module):
    def __init__(self, vocab=8, dim=24, heads=2, length=9):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, dim))
        self.out = nn.Linear(dim, vocab)
        self.heads = heads
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, ids):
        b, t = ids.shape
        x = self.embed(ids) + self.position.weight[:t]
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + self.mask[:t, :t]
        mixed = (
            (torch.softmax(score, -1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, -1)
        )
        x = x + self.proj(mixed)
        return self.out(x + self.mlp(x))


net = Causal()
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(160):
    ids = torch.randint(0, 8, (16, 9))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(ids)
    loss = F.cross_entropy(logits[:, 3:].float().flatten(0, 1), ids[:, :-3].flatten())
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, f"{loss.item():.4f}")
