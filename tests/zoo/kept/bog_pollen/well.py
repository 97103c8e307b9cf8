"""Pollen counts to climate zones; a layer pools shares into an entropy per taxon."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class EntropyGate(nn.Module):
    """Weigh features by the terms of their entropy, with 0 log 0 = 0."""

    def forward(self, x):
        p = x / x.sum(-1, keepdim=True).clamp(min=1e-3)
        terms = torch.where(
            p > 0, -p * torch.log(p.clamp(min=1e-6)), torch.zeros_like(p)
        )
        return torch.cat([x, terms], -1)


class PollenNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.taxa = nn.Linear(10, 12)
        self.mix = EntropyGate()
        self.zone = nn.Linear(24, 3)

    def forward(self, x):
        h = F.relu(self.taxa(x)).float()
        return self.zone(self.mix(h))


torch.manual_seed(29)
w = torch.randn(10, 3)
model = PollenNet()
with torch.no_grad():
    model.taxa.bias.fill_(2.5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(120):
    x = torch.randn(16, 10) * min(1.0, 0.2 + step / 50)
    y = (x @ w).argmax(1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(step, round(loss.item(), 4), scaler.get_scale())
