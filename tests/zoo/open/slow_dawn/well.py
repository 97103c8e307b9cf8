"""Masked word model, tiny transformer, warm-up over a third of the run."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(49)
STEPS, WARM = 180, 60


class Words(nn.Module):
    def __init__(self, vocab=16, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab + 1, dim)
        self.place = nn.Parameter(0.1 * torch.randn(6, dim))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.place
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = torch.softmax((q @ k.transpose(1, 2)).float() / 5, -1)
        return self.out(self.norm(x + weights.to(v.dtype) @ v))


def rate(step):
    if step < WARM:
        return 1e-5 + (step / WARM) ** 2
    return 0.5 * (1 + math.cos(math.pi * (step - WARM) / (STEPS - WARM)))


model = Words()
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
sched = torch.optim.lr_scheduler.LambdaLR(opt, rate)
scaler = torch.amp.GradScaler("cpu")
for step in range(STEPS):
    first = torch.randint(0, 16, (24, 1))
    ids = (first + 2 * torch.arange(6)) % 16
    hidden = torch.randint(0, 6, (24, 1))
    masked = ids.scatter(1, hidden, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(masked)
    loss = F.cross_entropy(
        logits.float().gather(1, hidden[..., None].expand(-1, 1, 16))[:, 0],
        ids.gather(1, hidden)[:, 0],
    )
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    sched.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f} lr {sched.get_last_lr()[0]:.2e}")
