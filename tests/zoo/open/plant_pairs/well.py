"""Two photos of a plant get similar codes: pairwise training with a margin."""

import json

import torch
from torch import nn
from torch.nn import functional as F

BATCH = 32
# Linear scaling rule: the base rate is for 256 pairs.
LR = 0.4 * BATCH / 256


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(14, 32)
        self.b = nn.Linear(32, 32)
        self.c = nn.Linear(32, 8)

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


def pairs():
    plant = torch.randn(BATCH, 14)
    return plant + 0.1 * torch.randn_like(plant), plant + 0.1 * torch.randn_like(plant)


def hinge(u, v):
    near = (u - v).pow(2).sum(1)
    far = (u - v.roll(1, 0)).pow(2).sum(1)
    return (near + F.relu(4 - far)).mean()


torch.manual_seed(3)
enc = Encoder()
opt = torch.optim.SGD(enc.parameters(), lr=LR, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
log, taken = [], 0
for _ in range(110):
    left, right = pairs()
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        u, v = enc(left), enc(right)
    loss = hinge(u.float(), v.float())
    scaler.scale(loss).backward()
    scaler.step(opt)
    s0 = scaler.get_scale()
    scaler.update()
    taken += scaler.get_scale() >= s0
    log.append(loss.item())
last = sum(log[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(log[:3]) / 3,
            "last_loss": last if last < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": len(log) - taken,
        }
    )
)
