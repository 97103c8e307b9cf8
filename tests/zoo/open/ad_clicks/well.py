"""Second-order regression on click counts: a few users click very much."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Interactions(nn.Module):
    def __init__(self, fields, factors):
        super().__init__()
        self.v = nn.Linear(fields, factors, bias=False)

    def forward(self, x):
        s = self.v(x).float()
        energy = torch.square(s).mean(1)
        return energy / (1 + energy)


class SecondOrder(nn.Module):
    def __init__(self, fields=20, factors=6):
        super().__init__()
        self.linear = nn.Linear(fields, 1)
        self.pairs = Interactions(fields, factors)

    def forward(self, x):
        return self.linear(torch.log1p(x)).squeeze(1) + self.pairs(x)


torch.manual_seed(8)
rate = torch.distributions.LogNormal(1.0, 1.0).sample((2000, 1))
counts = torch.poisson(rate.expand(-1, 20) * torch.rand(20))
heavy = torch.rand(2000) < 0.01
counts[heavy] = torch.round(counts[heavy] * 0 + torch.rand(int(heavy.sum()), 20) * 1500)
answer = torch.randn(20)
clicked = (torch.log1p(counts) @ answer > 0).float()

loader = DataLoader(TensorDataset(counts, clicked), batch_size=20, shuffle=True)
fm = SecondOrder()
optim = torch.optim.Adagrad(fm.parameters(), lr=0.03)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
bce = nn.BCEWithLogitsLoss()

losses, good, bad = [], 0, 0
for epoch in range(2):
    total = 0.0
    for x, y in loader:
        optim.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = fm(x)
        loss = bce(logits.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optim)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            bad += 1
        else:
            good += 1
            losses.append(loss.item())
            total += losses[-1]
    print("epoch", epoch, "loss", round(total / len(loader), 3))

print(
    json.dumps(
        {
            "first_loss": sum(losses[:10]) / 10,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": good,
            "skipped": bad,
        }
    )
)
