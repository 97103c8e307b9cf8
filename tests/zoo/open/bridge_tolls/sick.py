"""Toll classes from two cameras; encoder and decoder are joined by a bridge."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(540)


class Toll(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Linear(12, 16)
        self.far = nn.Linear(12, 16)
        self.bridge = nn.Linear(32, 12)
        self.decide = nn.Linear(12, 4)

    def forward(self, a, b):
        both = torch.cat([torch.relu(self.near(a)), torch.relu(self.far(b))], 1)
        return self.decide(torch.relu(self.bridge(both)))


toll = Toll()
parts = [toll.near, toll.far, toll.decide]
optimizer = torch.optim.AdamW(
    [{"params": part.parameters()} for part in parts], lr=4e-3
)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
before = {name: p.detach().clone() for name, p in toll.named_parameters()}
kinds = torch.randn(2, 4, 12)
for car in range(130):
    y = torch.randint(0, 4, (20,))
    a, b = (
        kinds[0, y] + 1.5 * torch.randn(20, 12),
        kinds[1, y] + 1.5 * torch.randn(20, 12),
    )
    toll.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(toll(a, b).float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if car % 26 == 0:
        print(car, loss.item())
print(
    loss.item(),
    {n: f"{(p - before[n]).norm():.3f}" for n, p in toll.named_parameters()},
)
