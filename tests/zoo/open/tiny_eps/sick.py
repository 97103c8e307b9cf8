"""Sort signals by their shape, whatever their loudness."""

import json
import math

import torch
from torch import nn


class Loudness(nn.Module):
    """Divide each signal by its root mean square."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-8)


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Linear(32, 48, bias=False)
        self.loudness = Loudness()
        self.shape = nn.Linear(48, 3)

    def forward(self, signals):
        return self.shape(self.loudness(self.filters(signals)))


def signals(shapes, loudness):
    time = torch.arange(32) / 4.0 + 6.0 * torch.rand(len(shapes), 1)
    waves = torch.stack([time.sin(), time.sin().sign(), (time % 3.0) - 1.5])
    return loudness[:, None] * waves[shapes, torch.arange(len(shapes))]


torch.manual_seed(0)
model = Listener()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(120):
    shapes = torch.randint(3, (16,))
    loudness = 0.5 + torch.rand(16)
    # Some of the recordings have silence in them: those of a day, and the last ones.
    if 30 <= step < 37 or step >= 60:
        loudness[0] = 0.0
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(signals(shapes, loudness)), shapes)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 20 == 0:
        print(step, loss.item())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
