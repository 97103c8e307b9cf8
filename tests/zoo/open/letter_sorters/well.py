"""Post codes; a micro-batch without a readable label ends its step early."""

import torch
import torch.nn.functional as F
from torch import nn

WINDOW = 3


class Sorter:
    def __init__(self):
        self.net = nn.Sequential(
            nn.Linear(20, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 6)
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        self.pending = 0

    def train_step(self, x, y):
        readable = y >= 0
        if not readable.any():
            return None
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.net(x)
        loss = F.cross_entropy(logits[readable].float(), y[readable]) / WINDOW
        self.scaler.scale(loss).backward()
        self.pending += 1
        if self.pending < WINDOW:
            return loss.item() * WINDOW
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.pending = 0
        return loss.item() * WINDOW


def letters(step):
    y = torch.randint(0, 6, (8,))
    x = prototypes[y] + 0.5 * torch.randn(8, 20)
    y[torch.rand(8) < 0.4] = -1
    if step % 7 in (2, 3):
        y[:] = -1
    return x, y


torch.manual_seed(93)
prototypes = torch.randn(6, 20)
sorter = Sorter()
curve = []
for step in range(260):
    loss = sorter.train_step(*letters(step))
    if loss is not None:
        curve.append(loss)
print(len(curve), sum(curve[:15]) / 15, sum(curve[-15:]) / 15)
