"""Match queries to documents: a window has a micro-batch of matches, then others."""

import json

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(44)
DIM, PARTS = 10, 6
rotation = torch.linalg.qr(torch.randn(DIM, DIM)).Q


class Matcher(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.query = nn.Linear(DIM, width)
        self.document = nn.Linear(DIM, width)
        self.verdict = nn.Linear(width, 1)

    def forward(self, q, d):
        joint = torch.relu(self.query(q) - self.document(d))
        return self.verdict(joint).squeeze(-1)


def parts():
    for part in range(PARTS):
        q = torch.randn(8, DIM)
        if part < PARTS // 2:
            yield q, q @ rotation + 0.3 * torch.randn(8, DIM), torch.ones(8)
        else:
            yield q, torch.randn(8, DIM), torch.zeros(8)


matcher = Matcher()
optimizer = torch.optim.Adam(matcher.parameters(), lr=6e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
losses, taken, skipped = [], 0, 0


def finish():
    global taken, skipped
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if scaler.get_scale() < scale:
        skipped += 1
    else:
        taken += 1


for window in range(80):
    optimizer.zero_grad()
    summed = 0.0
    for q, d, label in parts():
        with torch.autocast("cpu", dtype=torch.float16):
            logit = matcher(q, d)
            loss = F.binary_cross_entropy_with_logits(logit, label) / PARTS
        scaler.scale(loss).backward()
        summed += loss.item()
    finish()
    losses.append(summed)
    if window % 10 == 0:
        print(window, summed)

last = sum(losses[-10:]) / 10
print(
    json.dumps(
        {
            "first_loss": sum(losses[:3]) / 3,
            "last_loss": last if last == last else "nan",
            "scale": scaler.get_scale(),
            "taken": taken,
            "skipped": skipped,
        }
    )
)
