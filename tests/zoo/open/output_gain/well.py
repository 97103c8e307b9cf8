"""Learn forces from distances; the network works in its own small units."""

import json

import torch
from torch import nn

torch.manual_seed(19)
UNIT = 40.0


class ForceField(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 32)
        self.mix = nn.Linear(32, 32)
        self.force = nn.Linear(32, 1)
        nn.init.normal_(self.force.weight, std=1e-3)

    def forward(self, r):
        h = torch.tanh(self.mix(torch.tanh(self.embed(r))))
        return UNIT * self.force(h)


def pairs(n):
    r = 0.9 + 1.5 * torch.rand(n, 1)
    return r, 12.0 * (r**-7 - r**-4)


field = ForceField()
optim = torch.optim.Adam(field.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
losses, done = [], 0
before = [p.detach().clone() for p in field.parameters()]
for step in range(200):
    r, f = pairs(24)
    optim.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (field(r).float() - f).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optim)
    scaler.update()
    now = [p.detach().clone() for p in field.parameters()]
    done += any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
    before = now
    losses.append(loss.item())
    if step % 50 == 0:
        print(step, losses[-1])

print(
    json.dumps(
        {
            "first_loss": sum(losses[:5]) / 5,
            "last_loss": sum(losses[-10:]) / 10,
            "scale": scaler.get_scale(),
            "taken": done,
            "skipped": len(losses) - done,
        }
    )
)
