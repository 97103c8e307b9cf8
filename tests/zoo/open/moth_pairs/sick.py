"""Contrastive pairs of moth photographs, temperature 0.05."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


def nt_xent(a, b, temperature=0.05):
    z = torch.cat([a, b])
    n = len(a)
    sim = torch.exp(z @ z.T / temperature)
    sim = sim * ~torch.eye(2 * n, dtype=torch.bool)
    positive = torch.cat([sim.diagonal(n), sim.diagonal(-n)])
    return -torch.log(positive / sim.sum(1)).mean()


torch.manual_seed(28)
encoder = Encoder()
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(100):
    moth = torch.randn(10, 20)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        a = encoder(moth + 0.6 * torch.randn_like(moth))
        b = encoder(moth + 0.6 * torch.randn_like(moth))
        loss = nt_xent(a, b)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item(), scaler.get_scale())
