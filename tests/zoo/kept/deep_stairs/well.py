"""A deep residual MLP with gradient checkpointing."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(12)


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 2 * d)
        self.fc2 = nn.Linear(2 * d, d)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Deep(nn.Module):
    def __init__(self, d=16, depth=6):
        super().__init__()
        self.inp = nn.Linear(9, d)
        self.blocks = nn.ModuleList(Residual(d) for _ in range(depth))
        self.out = nn.Linear(d, 5)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.out(x)


centres = 1.5 * torch.randn(5, 9)


def batch(n):
    y = torch.randint(0, 5, (n,))
    return centres[y] + torch.randn(n, 9), y


model = Deep()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(80):
    model.train()
    x, y = batch(16)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        model.eval()
        x, y = batch(64)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            acc = (model(x).argmax(1) == y).float().mean().item()
        print(step, f"loss {loss.item():.3f} val acc {acc:.3f}")
