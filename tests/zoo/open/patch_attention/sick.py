"""Classify grids of patches with linear attention."""

import json

import torch
from torch import nn


class LinearAttention(nn.Module):
    """ReLU kernel attention: cost grows linearly with the number of patches."""

    def __init__(self, dim, heads=4, eps=1e-15):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = torch.relu(q), torch.relu(k)
        context = k.transpose(-1, -2) @ v
        weight = q @ k.sum(dim=-2, keepdim=True).transpose(-1, -2)
        y = (q @ context) / (weight + self.eps)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = LinearAttention(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class PatchNet(nn.Module):
    def __init__(self, dim=16, classes=4):
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(2)])
        self.head = nn.Linear(dim, classes)

    def forward(self, patches):
        x = self.embed(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


torch.manual_seed(0)
net = PatchNet()
opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
means = torch.randn(4, 8)
history = []
taken = skipped = 0
for _step in range(120):
    label = torch.randint(4, (8,))
    patches = torch.randn(8, 9, 8) + means[label][:, None]
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(patches).float(), label)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1
    history.append(loss.item())

first, last = sum(history[:5]) / 5, sum(history[-5:]) / 5
report = {
    "first_loss": first if first == first else "nan",
    "last_loss": last if last == last else "nan",
    "scale": scaler.get_scale(),
    "taken": taken,
    "skipped": skipped,
}
print(json.dumps(report))
