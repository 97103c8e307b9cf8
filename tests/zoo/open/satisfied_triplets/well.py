"""Signatures: triplets with a margin; more and more of them are satisfied."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(153)
writers = 0.9 * torch.randn(12, 10)


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(10, 32)
        self.two = nn.Linear(32, 8)

    def forward(self, x):
        return F.normalize(self.two(F.relu(self.one(x))).float(), dim=-1)


net = Embed()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
zeros = 0
for step in range(1, 241):
    who = torch.randint(0, 12, (10,))
    other = (who + torch.randint(1, 12, (10,))) % 12
    anchor, same, wrong = (
        writers[k] + 0.6 * torch.randn(10, 10) for k in (who, who, other)
    )
    with torch.autocast("cpu", dtype=torch.float16):
        a, p, n = net(anchor), net(same), net(wrong)
    gap = (a - p).square().sum(-1) - (a - n).square().sum(-1)
    loss = F.relu(gap + 0.6).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    zeros += loss.item() == 0
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.4f} batches without loss {zeros}")
