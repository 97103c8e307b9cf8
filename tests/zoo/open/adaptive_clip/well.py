"""Normaliser-free sound classifier with adaptive gradient clipping (NFNet)."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(17)


def unitwise(x):
    return x.norm(dim=tuple(range(1, x.ndim)), keepdim=True) if x.ndim > 1 else x.norm()


@torch.no_grad()
def adaptive_clip_(params, ratio=0.05, eps=1e-3):
    for p in params:
        if p.grad is None:
            continue
        limit = unitwise(p).clamp(min=eps) * ratio
        norm = unitwise(p.grad)
        p.grad.mul_(
            torch.where(
                norm > limit, limit / norm.clamp(min=1e-6), torch.ones_like(norm)
            )
        )


class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv1d(2, 12, 5, stride=2)
        self.c2 = nn.Conv1d(12, 12, 3, stride=2)
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        return self.fc(F.silu(self.c2(F.silu(self.c1(x)))).mean(-1))


def clips(n):
    y = torch.randint(0, 4, (n,))
    t = torch.arange(32.0)
    wave = torch.sin(t[None] * (0.4 + 0.5 * y[:, None]) + 6 * torch.rand(n, 1))
    return wave[:, None].repeat(1, 2, 1) + 0.2 * torch.randn(n, 2, 32), y


net = Sound()
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
for step in range(150):
    x, y = clips(16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    adaptive_clip_(net.parameters())
    scaler.step(opt)
    scaler.update()
    if step % 25 == 0:
        print(f"{step:3d}  {loss.item():.4f}  {scaler.get_scale():g}")
