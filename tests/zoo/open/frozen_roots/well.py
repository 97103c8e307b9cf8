"""The lower layers are frozen, and join the optimizer half-way."""

import json

import torch
from torch import nn


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.roots = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU())
        self.crown = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))

    def forward(self, x):
        return self.crown(self.roots(x))


torch.manual_seed(48)
tree = Tree()
tree.roots.requires_grad_(False)
opt = torch.optim.SGD(tree.crown.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
rule = torch.randn(8, 3)
losses, skipped = [], 0
for it in range(140):
    if it == 70:
        tree.roots.requires_grad_(True)
        opt.add_param_group({"params": list(tree.roots.parameters()), "lr": 0.01})
    x = torch.randn(32, 8)
    kind = (x @ rule).argmax(1)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(tree(x).float(), kind)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": 140 - skipped,
            "skipped": skipped,
        }
    )
)
