"""An Elman network sums pulses; one-cycle schedule."""

import json

import torch
from torch import nn

PEAK = 0.05


class Elman(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.size = size
        self.i2h = nn.Linear(1, size)
        self.h2h = nn.Linear(size, size)
        self.h2o = nn.Linear(size, 1)

    def forward(self, pulses):
        h = torch.zeros(pulses.shape[0], self.size)
        for pulse in pulses.split(1, dim=1):
            h = nn.functional.leaky_relu(self.i2h(pulse) + self.h2h(h))
        return self.h2o(h)[:, 0]


def batch(n=16, length=6):
    pulses = (torch.rand(n, length) < 0.4).float()
    return pulses, pulses.sum(1)


torch.manual_seed(8)
rnn = Elman()
with torch.no_grad():
    rnn.h2h.weight.copy_(0.9 * torch.eye(16))
steps = 130
opt = torch.optim.SGD(rnn.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(
    opt, max_lr=PEAK, total_steps=steps, div_factor=500, pct_start=0.6
)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
seen, skipped = [], 0
for _ in range(steps):
    pulses, count = batch()
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        guess = rnn(pulses)
    loss = ((guess.float() - count) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    sched.step()
    seen.append(loss.item())

end = sum(seen[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(seen[:5]) / 5,
            "last_loss": end if abs(end) < 1e30 else "nan",
            "scale": scaler.get_scale(),
            "taken": steps - skipped,
            "skipped": skipped,
        }
    )
)
