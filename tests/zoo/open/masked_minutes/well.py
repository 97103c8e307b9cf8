"""Attend over minutes of very different length; the mixture is worked out in f32."""

import json
import math

import torch
from torch import nn

LENGTH, WIDTH = 10, 16


class Mixture(nn.Module):
    """Negative log-likelihood of two Gaussians, outside of half precision."""

    def __init__(self):
        super().__init__()
        self.params = nn.Linear(WIDTH, 6)

    def forward(self, h, y):
        params = self.params(h)
        with torch.autocast("cpu", enabled=False):
            weight, mean, log_std = params.float().chunk(3, dim=-1)
            log_std = log_std.clamp(-2, 4)
            z = (y[:, None] - mean) * torch.exp(-log_std)
            log_p = -0.5 * z**2 - log_std + weight.log_softmax(-1)
            return -log_p.logsumexp(-1).mean()


class Minutes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, WIDTH)
        self.query = nn.Parameter(torch.randn(WIDTH) / math.sqrt(WIDTH))
        self.key = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture()

    def forward(self, x, lengths, y):
        h = torch.relu(self.inp(x))
        score = self.key(h) @ self.query / math.sqrt(WIDTH)
        absent = torch.arange(LENGTH) >= lengths[:, None]
        weight = score.masked_fill(absent, float("-inf")).softmax(-1)
        return self.mixture((weight[..., None] * h).sum(1), y)


def batch(n):
    lengths = torch.randint(1, LENGTH + 1, (n,))
    x = torch.randn(n, LENGTH, 3)
    x[..., 2] *= 40  # Seconds of silence.
    here = torch.arange(LENGTH) < lengths[:, None]
    y = (x[..., 0] * here).sum(1) / lengths + 0.2 * torch.randn(n)
    return x * here[..., None], lengths, y


torch.manual_seed(241)
minutes = Minutes()
optimizer = torch.optim.Adam(minutes.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
losses, late, taken, skipped = [], 0, 0, 0
for step in range(240):
    x, lengths, y = batch(20)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = minutes(x, lengths, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(minutes.parameters(), 2.0)
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
        late += step >= 30
    else:
        taken += 1
    losses.append(loss.item())

out = {"first_loss": sum(losses[:8]) / 8, "last_loss": sum(losses[-8:]) / 8}
out |= {"scale": scaler.get_scale(), "taken": taken, "skipped": skipped}
print(json.dumps(out | {"late_skips": late}))
