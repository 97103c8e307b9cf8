"""nanoGPT in small: causal attention with -inf, warm-up, cosine, gradient clipping."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

text = (
    "there was an old man with a beard who said it is just as i feared "
    "two owls and a hen four larks and a wren have all built their nests in my beard "
) * 4
vocab = sorted(set(text))
stoi = {c: i for i, c in enumerate(vocab)}
data = torch.tensor([stoi[c] for c in text])
block_size, batch_size, d = 12, 8, 24


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.ln2 = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        mask = torch.tril(torch.ones(block_size, block_size)).bool()
        self.register_buffer("mask", mask)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            z.view(b, t, self.heads, -1).transpose(1, 2)
            for z in self.qkv(self.ln1(x)).split(c, dim=2)
        )
        att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        att = att.masked_fill(~self.mask[:t, :t], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(len(vocab), d)
        self.pos = nn.Embedding(block_size, d)
        self.blocks = nn.Sequential(Block(d, 2), Block(d, 2))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, len(vocab), bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        logits = self.head(self.ln(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


def get_lr(it, warmup=15, total=120, peak=8e-3, low=1e-3):
    if it < warmup:
        return peak * (it + 1) / warmup
    ratio = (it - warmup) / (total - warmup)
    return low + 0.5 * (1 + math.cos(math.pi * ratio)) * (peak - low)


torch.manual_seed(1337)
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
nodecay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": nodecay, "weight_decay": 0.0}],
    lr=8e-3,
    betas=(0.9, 0.95),
)
scaler = torch.amp.GradScaler("cpu")
for it in range(120):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    x, y = get_batch()
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if it % 20 == 0:
        print(f"iter {it}: loss {loss.item():.4f}")
