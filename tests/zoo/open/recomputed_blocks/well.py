"""Deep residual classifier of spectra with activation checkpointing."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(152)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.one = nn.Linear(dim, dim)
        self.two = nn.Linear(dim, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.two(F.silu(self.one(self.norm(x))))).float()


class Deep(nn.Module):
    def __init__(self, dim=24, depth=5):
        super().__init__()
        self.inp = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 4)

    def forward(self, x):
        x = self.inp(x).float()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


net = Deep()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
lines = torch.randn(4, 16)
for step in range(90):
    y = torch.randint(0, 4, (24,))
    x = lines[y] * (0.5 + torch.rand(24, 1)) + 0.8 * torch.randn(24, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 15 == 0:
        print(step, round(loss.item(), 4), scaler.get_scale())
