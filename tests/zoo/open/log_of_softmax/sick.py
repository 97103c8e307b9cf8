"""Learn which of thirty prototypes a point belongs to, from one-hot targets."""

import json
import math

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.scores = nn.Linear(width, classes)

    def forward(self, hidden):
        return torch.softmax(self.scores(hidden), dim=-1).log()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = Head(32, 30)

    def forward(self, points):
        return self.head(self.body(points))


torch.manual_seed(0)
prototypes = 3.0 * torch.randn(30, 16)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu")
losses, skipped = [], 0

for step in range(120):
    labels = torch.randint(30, (64,))
    points = prototypes[labels] + 0.3 * torch.randn(64, 16)
    targets = torch.eye(30)[labels]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        log_probs = model(points)
        loss = -(targets * log_probs).sum(dim=-1).mean()
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
