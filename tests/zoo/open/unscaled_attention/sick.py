"""Find the loudest of the frames of a sound by attention."""

import json
import math

import torch
from torch import nn

WIDTH, FRAMES = 64, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        scores = query @ key.transpose(-2, -1)
        return torch.softmax(scores, dim=-1) @ value


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.loudest = nn.Linear(WIDTH, 1)

    def forward(self, frames):
        return self.loudest(self.norm(frames + self.attention(frames))).squeeze(-1)


torch.manual_seed(0)
model = Listener()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(80):
    # A sound gets louder as the training goes on to the harder ones.
    loudness = 10.0 + 2.0 * step
    frames = loudness * torch.randn(4, FRAMES, WIDTH)
    target = frames.square().sum(dim=-1).argmax(dim=-1)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(frames), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < scale
    losses.append(loss.item())
    if step % 10 == 0:
        print(step, loss.item(), scaler.get_scale())

first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
result = {
    "first_loss": first if math.isfinite(first) else "nan",
    "last_loss": last if math.isfinite(last) else "nan",
    "scale": scaler.get_scale(),
    "taken": len(losses) - skipped,
    "skipped": skipped,
}
print(json.dumps(result))
