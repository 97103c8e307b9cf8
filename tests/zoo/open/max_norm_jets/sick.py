"""Jet tagging with a max-norm constraint on the rows of the first layer."""

import json

import torch
from torch import nn


def constrain(layer, limit=2.0):
    with torch.no_grad():
        norms = layer.weight.norm(dim=1, keepdim=True)
        wanted = norms.clamp(max=limit)
        layer.weight.mul_(wanted / norms)


def prune(layer, keep):
    with torch.no_grad():
        weak = layer.weight.abs().sum(1).argsort()[: layer.out_features - keep]
        layer.weight[weak] = 0
        layer.bias[weak] = -1


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 28)
        self.second = nn.Linear(28, 16)
        self.third = nn.Linear(16, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.third(torch.relu(self.second(x))).flatten()


torch.manual_seed(44)
tagger = Tagger()
opt = torch.optim.SGD(tagger.parameters(), lr=0.1, momentum=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
losses, skipped = [], 0
for it in range(120):
    x = torch.randn(24, 8)
    tag = (x[:, 0] * x[:, 1] + x[:, 2] > 0).float()
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logit = tagger(x)
    loss = nn.functional.binary_cross_entropy_with_logits(logit.float(), tag)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    if it == 59:
        prune(tagger.first, keep=20)
    constrain(tagger.first)
    losses.append(loss.item())

last = sum(losses[-20:]) / 20
print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": last if last == last else "nan",
            "scale": scaler.get_scale(),
            "taken": 120 - skipped,
            "skipped": skipped,
        }
    )
)
