"""Everything that is delicate runs in float32: log, exp, norms; the rest is float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(111)


class Radial(nn.Module):
    """Edge features of a small graph network; self-loops have length 0."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.linspace(0, 2, 8))
        self.edge = nn.Linear(8, 12)

    def forward(self, pos):
        with torch.autocast("cpu", enabled=False):
            diff = pos[:, :, None] - pos[:, None]
            dist = (diff.square().sum(-1) + 1e-8).sqrt()
            rbf = torch.exp(-((dist[..., None] - self.centres) ** 2) * 4)
        return self.edge(rbf)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.move = nn.Linear(2, 2)
        self.radial = Radial()
        self.read = nn.Linear(12, 1)

    def forward(self, pos):
        pos = pos + 0.1 * self.move(pos).float()
        return self.read(F.silu(self.radial(pos))).sum((1, 2, 3))


net = Energy()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
for step in range(120):
    pos = torch.rand(8, 5, 2) * 2
    true = torch.exp(-torch.cdist(pos, pos)).sum((1, 2)) / 4
    with torch.autocast("cpu", dtype=torch.float16):
        energy = net(pos)
    loss = (energy.float() - true).square().mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 20 == 0:
        print(step, loss.item())
