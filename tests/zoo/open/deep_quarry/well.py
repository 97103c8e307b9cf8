"""Checkpointed blocks; one island in float32, and a head in bfloat16."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(142)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Energy(nn.Module):
    """In float32: squares of sums."""

    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x + self.proj(x.float()).square().add(1.0).log()


class Quarry(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inp = nn.Linear(9, width)
        self.blocks = nn.ModuleList([Block(width), Energy(width), Block(width)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(x).float()


rule = torch.randn(9, 4)
model = Quarry()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
for step in range(100):
    x = torch.randn(20, 9)
    y = (x @ rule).argmax(1)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 19:
        print(step + 1, round(loss.item(), 4), scaler.get_scale())
