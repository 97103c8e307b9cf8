"""Mazes get harder: the loss rises at each level, and falls again."""

import json

import torch
from torch import nn


class Maze(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.d = d
        self.cell = nn.Linear(4 + d, d)
        self.out = nn.Linear(d, 1)

    def forward(self, moves):
        h = moves.new_zeros(len(moves), self.d)
        for move in moves.unbind(1):
            h = torch.tanh(self.cell(torch.cat([move, h], 1)))
        return self.out(h).squeeze(1)


torch.manual_seed(85)
maze = Maze()
opt = torch.optim.Adam(maze.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
value = torch.tensor([1.0, -1.0, 0.5, -0.5])
losses, skipped = [], 0
for level in (1, 2, 4):
    for _ in range(45):
        ids = torch.randint(0, 4, (24, level))
        moves = nn.functional.one_hot(ids, 4).float()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = maze(moves)
        loss = nn.functional.mse_loss(out.float(), value[ids].sum(1))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_value_(maze.parameters(), 1.0)
        scaler.step(opt)
        scale = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < scale
        losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": len(losses) - skipped,
            "skipped": skipped,
        }
    )
)
