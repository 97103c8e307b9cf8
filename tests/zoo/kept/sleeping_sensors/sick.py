"""Match sensor traces by cosine; a sensor that is switched off sends zeros."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class UnitNorm(nn.Module):
    """Scale each row to length 1."""

    def __init__(self, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + self.eps)


class Matcher(nn.Module):
    def __init__(self, d_in=12, d=16, sites=6):
        super().__init__()
        self.project = nn.Linear(d_in, d, bias=False)
        self.unit = UnitNorm()
        self.sites = nn.Linear(d, sites, bias=False)

    def forward(self, x):
        return 5.0 * self.sites(self.unit(self.project(x)))


torch.manual_seed(17)
signature = torch.randn(6, 12)


def traces(step, n=16):
    y = torch.randint(0, 6, (n,))
    x = signature[y] + 0.6 * torch.randn(n, 12)
    if step % 8 == 6:
        x[torch.randint(0, n, (2,))] = 0.0
    return x, y


model = Matcher()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(140):
    x, y = traces(step)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 20 == 6:
        print(step, loss.item(), scaler.get_scale())
