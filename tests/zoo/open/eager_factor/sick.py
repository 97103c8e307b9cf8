"""Contrastive pairs of melodies; someone wanted the scale to find its level quickly."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(120)
growth = {"growth_factor": 64.0, "growth_interval": 5}


class Melody(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes = nn.Embedding(24, 16)
        self.conv = nn.Conv1d(16, 24, 3)
        self.proj = nn.Linear(24, 12)

    def forward(self, ids):
        x = F.relu(self.conv(self.notes(ids).transpose(1, 2))).mean(-1)
        return F.normalize(self.proj(x).float(), dim=-1)


def pairs(n):
    tune = torch.randint(0, 12, (n, 8))
    other = (tune + 2).where(torch.rand(n, 8) < 0.8, torch.randint(0, 24, (n, 8)))
    return tune, other


net = Melody()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, **growth)
for step in range(150):
    a, b = pairs(16)
    with torch.autocast("cpu", dtype=torch.float16):
        za, zb = net(a), net(b)
    logits = za.float() @ zb.float().t() / 0.1
    loss = F.cross_entropy(logits, torch.arange(16))
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 15 == 14:
        print(f"step {step + 1:3d} loss {loss.item():.3f} scale {scaler.get_scale():g}")
