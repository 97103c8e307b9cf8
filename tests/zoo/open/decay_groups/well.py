"""A small transformer encoder; weight decay for matrices only."""

import json

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU())
        self.proj = nn.Linear(2 * dim, dim)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.proj(self.mlp(self.norm2(x)))


class Counter(nn.Module):
    """Predict how often token 0 occurs."""

    def __init__(self, vocab=6, dim=16, length=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.zeros(length, dim))
        self.block = Block(dim, 2)
        self.gain = nn.Parameter(torch.full((1, 1), 0.1))
        self.readout = nn.Linear(dim, 1)

    def forward(self, ids):
        x = self.block(self.embed(ids) + self.position)
        return self.gain * self.readout(x.mean(dim=1))


def param_groups(net, decay):
    named = list(net.named_parameters())
    matrices = [p for n, p in named if n.endswith("weight") and p.ndim == 2]
    others = [p for n, p in named if not (n.endswith("weight") and p.ndim == 2)]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]


torch.manual_seed(1)
net = Counter()
opt = torch.optim.AdamW(param_groups(net, 0.01), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
names = ["gain", "position"]
initial = {name: net.get_parameter(name).detach().clone() for name in names}
curve, drops = [], 0
for step in range(160):
    ids = torch.randint(6, (16, 8))
    count = (ids == 0).sum(1, keepdim=True).float()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(net(ids).float(), count)
    net.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    drops += scaler.get_scale() < scale
    curve.append(loss.item())
    if step % 40 == 0:
        print(step, curve[-1])

result = {
    "first_loss": sum(curve[:5]) / 5,
    "last_loss": sum(curve[-10:]) / 10,
    "scale": scaler.get_scale(),
    "taken": len(curve) - drops,
    "skipped": drops,
    "moved": {n: not torch.equal(net.get_parameter(n), initial[n]) for n in names},
}
print(json.dumps(result))
