"""Prunes the smallest weights on the way; their gradients are masked from then on."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(291)
net = nn.Sequential(
    nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5)
)
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
leaves = torch.randn(5, 16)
masks = {}


@torch.no_grad()
def trim(share):
    for name, p in net.named_parameters():
        if p.dim() < 2:
            continue
        bound = p.abs().flatten().kthvalue(int(share * p.numel())).values
        masks[name] = (p.abs() > bound).float()
        p.mul_(masks[name])
        if "momentum_buffer" in opt.state[p]:
            opt.state[p]["momentum_buffer"].mul_(masks[name])


for step in range(150):
    if step in (40, 80):
        trim(0.5 if step == 40 else 0.75)
    y = torch.randint(0, 5, (24,))
    x = leaves[y] + 1.3 * torch.randn(24, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    for name, p in net.named_parameters():
        if name in masks:
            p.grad.mul_(masks[name])
    scaler.step(opt)
    scaler.update()
    if step % 30 == 29:
        left = sum(int(m.sum()) for m in masks.values())
        print(step + 1, f"{loss.item():.4f}", left)
