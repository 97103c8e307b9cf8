"""LoRA on a frozen character model."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(
            torch.randn(rank, base.in_features) / math.sqrt(base.in_features)
        )
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class CharModel(nn.Module):
    def __init__(self, letters=14, width=24):
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.mix = nn.Linear(3 * width, width)
        self.out = nn.Linear(width, letters)

    def forward(self, trigram):
        return self.out(torch.relu(self.mix(self.embed(trigram).flatten(1))))


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


torch.manual_seed(15)
model = CharModel().requires_grad_(False)
model.out = LoraLinear(model.out)
model.mix = LoraLinear(model.mix)
optimizer = torch.optim.AdamW(trainable(model), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
rule = torch.randint(0, 14, (14, 14))
losses = []
for _step in range(100):
    text = torch.randint(0, 14, (32, 3))
    target = rule[text[:, 0], text[:, 2]]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(text), target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print("first", losses[0], "last", losses[-1])
